"""Generated text in the terminal, each token in the colour of the outer steps it took."""

import unicodedata
from collections.abc import Iterable, Sequence

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from hrmlm.errors import UserError
from hrmlm.inference.generation import Engine
from hrmlm.inference.rows import TokenEvent

COLOURS = ("blue3", "dodger_blue1", "cyan3", "spring_green3", "chartreuse3", "yellow3", "orange3", "red1")
"""From few steps to many."""


def visible(text: str) -> str:
    """Text without the power to command a terminal: control characters as escapes, line ends and tabs as they are."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)


def style(steps: int, most: int) -> str:
    """Colour of a number of steps where `most` are possible."""
    place = (min(steps, most) - 1) / max(1, most - 1)
    return COLOURS[max(0, round(place * (len(COLOURS) - 1)))]


class DepthWriter:
    """Writes the text of one row, as it comes, to a console; then what the colours mean.

    Where the console has no colours the text is plain, and a line with the steps of every token follows it. most: the
    largest number of steps that is possible. A character of several tokens has the colour of the one that completed it.
    """

    def __init__(self, console: Console, most: int) -> None:
        self._console, self._most = console, most
        self._steps: list[int] = []
        has_colours = console.is_terminal and console.color_system is not None and not console.no_color
        self._colours: ColorSystem | None = COLOR_SYSTEMS[console.color_system] if has_colours else None  # type: ignore[index]

    def plain(self, text: str) -> None:
        """Text that no step stands behind, such as the prompt."""
        self._console.file.write(text)
        self._console.file.flush()

    def write(self, event: TokenEvent) -> None:
        """The text of one token."""
        self._steps.append(event.steps)
        for text, token in event.pieces:
            shown = visible(text) if self._console.is_terminal else text
            self.plain(self._coloured(shown, self._steps[token]))

    def finish(self) -> None:
        """End the line and tell the steps: as a legend, or token by token."""
        self.plain("\n")
        if not self._steps:
            return
        mean = f"mean {sum(self._steps) / len(self._steps):.2f} over {len(self._steps)} tokens"
        numbers = self._steps
        if self._colours is not None:
            numbers = list(range(min([1, *self._steps]), max([self._most, *self._steps]) + 1))
        self.plain(f"steps: {' '.join(self._coloured(str(number), number) for number in numbers)} ({mean})\n")

    def _coloured(self, text: str, steps: int) -> str:
        """The text itself between two codes: rich's own printing would change tabs and returns."""
        return Style.parse(style(steps, self._most)).render(text, color_system=self._colours)


def show_depths(engine: Engine, prompts: Sequence[str], most: int) -> None:
    """Print prompts and what follows them, in the colours of its steps: one as it comes, several when they are done.

    Raises: UserError for a model that does not decide its depth, before anything is printed.
    """
    if not engine.decides_depth:
        raise UserError("--show-depth: this model does not decide its depth; all tokens take the same steps")
    events: Iterable[TokenEvent] = engine.run()
    if len(prompts) > 1:
        events = list(events)
    for row, prompt in enumerate(prompts):
        writer = DepthWriter(Console(), most)
        writer.plain(prompt)
        for event in events:
            if event.row == row:
                writer.write(event)
        writer.finish()
        if len(prompts) > 1:
            writer.plain("\n")
