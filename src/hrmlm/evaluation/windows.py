"""Which tokens each window of a sliding evaluation reads and which of them it scores."""

from collections.abc import Iterator
from typing import NamedTuple

from hrmlm.errors import UserError


class Window(NamedTuple):
    """One window over a stream: the model reads tokens start..end-1 and predicts start+1..end.

    The predictions of tokens first..end are scored; those before `first` were scored by an earlier window.
    """

    start: int
    end: int
    first: int


def check_window(window: int, stride: int, context: int) -> None:
    """Raise UserError unless 1 <= stride <= window <= context (all in tokens)."""
    if not 1 <= window <= context:
        raise UserError(f"window {window}: must be from 1 to the model's context, {context}")
    if not 1 <= stride <= window:
        raise UserError(f"stride {stride}: must be from 1 to the window, {window}")


def plan_windows(n_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows that together score each of tokens 1..n_tokens-1 exactly once.

    Window k starts at k * stride and reads at most `window` tokens. A token is scored by the first window that
    predicts it, which is the one that gives it most context: all tokens before it at the start of the stream, at
    least window - stride + 1 of them later. So stride 1 gives each token its full allowed context and
    stride = window gives disjoint blocks. A stream of fewer than two tokens has no windows.
    """
    start, first = 0, 1
    while first < n_tokens:
        end = min(start + window, n_tokens - 1)
        yield Window(start, end, first)
        start, first = start + stride, end + 1
