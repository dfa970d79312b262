"""Stop strings: held back, removed, independent of the cutting (R40)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrmlm.inference.stops import StopFilter


def _run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop_filter = StopFilter(stops)
    shown = [stop_filter.push(piece) for piece in pieces]
    return [*shown, stop_filter.finish()], stop_filter.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        ([], ["any", "thing"], ["any", "thing", ""], False),
        (["END"], ["aE", "ND", "b"], ["a", "", "", ""], True),
        (["END"], ["aE", "N", "x"], ["a", "", "ENx", ""], False),
        (["END"], ["xEEND tail"], ["x" + "E", ""], True),
        (["END"], ["E", "N"], ["", "", "EN"], False),
        (["aab"], ["aa", "a", "b"], ["", "a", "", ""], True),
        (["abcde", "cd"], ["abc", "d"], ["", "ab", ""], True),
        (["abcd", "cd"], ["xabcd"], ["x", ""], True),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", "", ""], True),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str], stopped: bool) -> None:
    assert _run(stops, pieces) == (shown, stopped)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=6),
)
def test_any_cutting_gives_the_same_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    whole, whole_stopped = _run(stops, [text])
    cut, cut_stopped = _run(stops, pieces)
    assert ("".join(cut), cut_stopped) == ("".join(whole), whole_stopped)
    assert whole_stopped == any(stop in text for stop in stops)
    if not whole_stopped:
        assert "".join(cut) == text
    assert not any(stop in "".join(cut) for stop in stops)
    shown_so_far = ""
    for piece in cut[:-1]:
        shown_so_far += piece
        assert text.startswith(shown_so_far), "what was shown is never taken back"
