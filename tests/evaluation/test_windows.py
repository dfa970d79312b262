"""The plan of sliding windows: every token once, with the most context that the rule allows (R28)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrmlm.errors import UserError
from hrmlm.evaluation.windows import Window, check_window, plan_windows

sizes = st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(1, 40)).filter(lambda s: s[2] <= s[1])


@given(sizes)
def test_every_token_after_the_first_is_scored_exactly_once_and_in_order(size: tuple[int, int, int]) -> None:
    n_tokens, window, stride = size
    scored = [token for w in plan_windows(n_tokens, window, stride) for token in range(w.first, w.end + 1)]
    assert scored == list(range(1, n_tokens))


@given(sizes)
def test_no_window_is_longer_than_asked_or_leaves_the_stream(size: tuple[int, int, int]) -> None:
    n_tokens, window, stride = size
    for k, w in enumerate(plan_windows(n_tokens, window, stride)):
        assert w.start == k * stride
        assert 1 <= w.end - w.start <= window
        assert w.end <= n_tokens - 1
        assert w.start < w.first <= w.end


@given(sizes)
def test_each_token_is_scored_by_the_window_that_gives_it_most_context(size: tuple[int, int, int]) -> None:
    n_tokens, window, stride = size
    for w in plan_windows(n_tokens, window, stride):
        for token in range(w.first, w.end + 1):
            best = min(start for start in range(0, token, stride) if token - start <= window)
            assert w.start == best
            assert token - w.start >= min(token, window - stride + 1)


def test_the_last_window_is_short_and_disjoint_blocks_are_disjoint() -> None:
    assert list(plan_windows(101, 10, 10))[-1] == Window(90, 100, 91)
    assert list(plan_windows(105, 10, 10))[-1] == Window(100, 104, 101)
    assert list(plan_windows(6, 10, 4)) == [Window(0, 5, 1)]
    assert list(plan_windows(1, 10, 4)) == []


@pytest.mark.parametrize(("window", "stride"), [(10, 0), (10, 11), (10, -1), (0, 1), (65, 1)])
def test_impossible_windows_and_strides_are_refused(window: int, stride: int) -> None:
    with pytest.raises(UserError, match="must be from 1 to"):
        check_window(window, stride, context=64)
