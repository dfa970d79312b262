"""Stop strings in a stream of text pieces."""

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The result does not depend on how the text is cut into pieces. Of several stop strings the one that is complete
    first counts; of those complete at the same character, the longest. Work per piece is bounded by the lengths of
    the piece and of the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everywhere"
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be shown now. After a stop string nothing comes any more."""
        if self.stopped:
            return ""
        text = self._held + piece
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        shown = len(text) - self._possible_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text held back, once it is known that no more follows."""
        rest, self._held = self._held, ""
        return rest

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
