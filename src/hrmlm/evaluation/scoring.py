"""Negative log-likelihoods of given tokens, in nats.

Shape letters: B batch, L positions, V vocabulary.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hrmlm.data.ids import IdFiles
from hrmlm.errors import UserError
from hrmlm.evaluation.windows import Window, check_window, plan_windows
from hrmlm.models.base import LanguageModel, ModelOutput, evaluating
from hrmlm.models.cache_policy import CachePolicy, parse_cache_policy
from hrmlm.parallel import ALONE, Parallel
from hrmlm.steps import depth_keywords

Ids = NDArray[np.integer] | torch.Tensor | Sequence[int] | IdFiles

_CHECK = 1 << 20  # ids looked at together when their range is checked


class DocumentScore(NamedTuple):
    """Total of one document scored on its own. steps: outer steps of its scored tokens together (None: fixed depth)."""

    nats: float
    tokens: int
    steps: int | None = None


class StreamScore(NamedTuple):
    """Scores of a stream of N ids, one for each of ids[1:]; all (N − 1,).

    nats: −ln p. steps: outer steps of the position that predicted the token, of models that decide their depth
    (None: all others). positions: place of that position in its window, from 0.
    """

    nats: NDArray[np.float64]
    steps: NDArray[np.int32] | None
    positions: NDArray[np.int32]


class _RowScore(NamedTuple):
    """Scores of the scored tokens of one row."""

    nats: NDArray[np.float64]
    steps: NDArray[np.int64] | None


def score_tokens(model: LanguageModel, ids: Ids, **settings: Any) -> NDArray[np.float64]:
    """Nats of each token of a stream given the tokens before it: `score_stream` without the steps.

    Returns: (N - 1,), the nats of ids[1:]; empty for fewer than two ids. Settings and errors as in `score_stream`.
    """
    return score_stream(model, ids, **settings).nats


def score_stream(
    model: LanguageModel,
    ids: Ids,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    depth: int | None = None,
    halt_threshold: float | None = None,
    exit: str | None = None,
    cache_policy: str | None = None,
    pad_id: int = 0,
    progress: bool = False,
    parallel: Parallel = ALONE,
) -> StreamScore:
    """Score each token of a stream given the tokens before it, by sliding windows (see `plan_windows`).

    ids: N token ids, one dimension; a memory map is read piece by piece. window: tokens the model reads at once
    (default: its context). stride: tokens between the starts of windows (default: the window, so disjoint blocks).
    depth: cycles or steps to run instead of the trained number. halt_threshold: sum of halting probabilities at which
    a position stops, instead of the trained one. exit: a policy by which positions stop, such as "change:0.1".
    cache_policy: read each window through a cache of this policy, which changes the result of all but "full" (None:
    no cache). pad_id fills the end of short windows, which a causal model cannot
    see; the result depends neither on it nor on batch_size (to float32 rounding). parallel: processes that divide the
    windows; all of them call this, and all get all of the scores.

    Raises: UserError for a window or stride out of range, an impossible depth, threshold or policy, or an id that the
    model cannot predict.
    """
    run = depth_keywords(model, depth, halt_threshold, exit)
    policy = None if cache_policy is None else parse_cache_policy(cache_policy)
    if policy is not None:
        model.check_cache_policy(policy, run["depth"], run["exit"])
    window = model.config.context if window is None else window
    stride = window if stride is None else stride
    check_window(window, stride, model.sequence_limit)
    ids = ids_array(ids)
    check_ids(model, ids)
    scored = max(len(ids) - 1, 0)
    nats, steps, positions = np.zeros(scored), np.zeros(scored, np.int32), np.zeros(scored, np.int32)
    has_steps = False
    windows = islice(plan_windows(len(ids), window, stride), parallel.rank, None, parallel.size)
    with evaluating(model), progress_bar(len(nats), progress) as advance:
        while batch := list(islice(windows, check_batch_size(batch_size))):
            rows = [np.asarray(ids[item.start : item.end + 1], dtype=np.int64) for item in batch]
            counts = [item.end + 1 - item.first for item in batch]
            scores = _score_rows(model, rows, counts, pad_id, run, policy)
            for item, score in zip(batch, scores, strict=True):
                place = slice(item.first - 1, item.end)
                nats[place] = score.nats
                positions[place] = np.arange(item.first - 1, item.end) - item.start
                if score.steps is not None:
                    steps[place], has_steps = score.steps, True
                advance(len(score.nats))
    nats, steps, positions = (parallel.total(array) for array in (nats, steps, positions))
    return StreamScore(nats, steps if any(parallel.gather(has_steps)) else None, positions)


def score_documents(
    model: LanguageModel,
    documents: Sequence[Ids],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    depth: int | None = None,
    halt_threshold: float | None = None,
    exit: str | None = None,
    pad_id: int = 0,
    progress: bool = False,
) -> list[DocumentScore]:
    """Score documents one by one: no document sees another. The first token of each is context only.

    Put the end-of-text id in front of a document to have its first token scored too. Totals depend neither on the
    batch size, nor on the order, nor on the pad id (to float32 rounding). Arguments and errors as in `score_stream`.

    Returns: one total per document, in the order given; (0.0, 0) for documents of fewer than two tokens.
    """
    run = depth_keywords(model, depth, halt_threshold, exit)
    window = model.config.context if window is None else window
    stride = window if stride is None else stride
    check_window(window, stride, model.sequence_limit)
    arrays = [ids_array(document) for document in documents]
    for array in arrays:
        check_ids(model, array)
    work = [(index, item) for index, array in enumerate(arrays) for item in plan_windows(len(array), window, stride)]
    work.sort(key=lambda pair: pair[1].start - pair[1].end)  # windows of like length together: less padding
    nats, counts = [0.0] * len(arrays), [0] * len(arrays)
    steps: list[int | None] = [None] * len(arrays)
    with evaluating(model), progress_bar(sum(max(len(array) - 1, 0) for array in arrays), progress) as advance:
        for batch in _batches(work, check_batch_size(batch_size)):
            rows = [np.asarray(arrays[index][item.start : item.end + 1], dtype=np.int64) for index, item in batch]
            scored = [item.end + 1 - item.first for _, item in batch]
            scores = _score_rows(model, rows, scored, pad_id, run)
            for (index, _), score in zip(batch, scores, strict=True):
                nats[index] += float(score.nats.sum())
                counts[index] += len(score.nats)
                if score.steps is not None:
                    steps[index] = (steps[index] or 0) + int(score.steps.sum())
                advance(len(score.nats))
    return [DocumentScore(*totals) for totals in zip(nats, counts, steps, strict=True)]


def _score_rows(
    model: LanguageModel,
    rows: Sequence[NDArray[np.int64]],
    scored: Sequence[int],
    pad_id: int,
    run: dict[str, Any],
    policy: CachePolicy | None = None,
) -> list[_RowScore]:
    """Scores of the last scored[i] tokens of row i, from one call of the model (or one per position, by the policy).

    A row is the window's inputs followed by the one token that only its last input predicts.
    """
    device = next(model.parameters()).device
    lengths = [len(row) - 1 for row in rows]
    tokens_BL, lengths_B = padded_rows([row[:-1] for row in rows], pad_id, device)
    last_only = max(scored) == 1  # stride 1: the head reads one position per row instead of a whole window
    read_B = torch.tensor(lengths, device=device) - 1 if last_only else None
    if policy is None:
        output = model(tokens_BL, lengths_B=lengths_B, read_B=read_B, **run)
    else:
        output = _through_cache(model, tokens_BL, lengths_B, read_B, run, policy)
    nats = []
    for i, (row, count) in enumerate(zip(rows, scored, strict=True)):  # row by row: one copy of L x V, not of B x L x V
        positions = slice(None) if last_only else slice(lengths[i] - count, lengths[i])
        targets_N = torch.from_numpy(row[-count:]).to(device)
        nats.append(F.cross_entropy(output.logits[i, positions].float(), targets_N, reduction="none").double())
    nats_by_row = np.split(torch.cat(nats).cpu().numpy(), np.cumsum(scored)[:-1])
    if output.steps_BL is None:
        return [_RowScore(row_nats, None) for row_nats in nats_by_row]
    steps_BL = output.steps_BL.cpu().numpy()
    return [
        _RowScore(row_nats, steps_BL[i, lengths[i] - count : lengths[i]])
        for i, (row_nats, count) in enumerate(zip(nats_by_row, scored, strict=True))
    ]


def _through_cache(
    model: LanguageModel,
    tokens_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    read_B: torch.Tensor | None,
    run: dict[str, Any],
    policy: CachePolicy,
) -> ModelOutput:
    """What the model makes of padded rows that are fed to an empty cache: at once, or one by one where it must be."""
    B, L = tokens_BL.shape
    cache = model.new_cache(B, L, depth=run["depth"], policy=policy)
    if not policy.is_sequential:
        return model(tokens_BL, cache=cache, lengths_B=lengths_B, read_B=read_B, **run)
    # The padding of short rows is fed as well: it stands behind them, and what it writes is never read.
    outputs = [model(tokens_B1, cache=cache, **run) for tokens_B1 in tokens_BL.split(1, dim=1)]
    logits_BLV = torch.cat([output.logits for output in outputs], dim=1)
    if read_B is not None:
        logits_BLV = logits_BLV[torch.arange(B, device=read_B.device), read_B][:, None]
    steps = [output.steps_BL for output in outputs if output.steps_BL is not None]
    return ModelOutput(logits_BLV, steps_BL=torch.cat(steps, dim=1) if steps else None)


def padded_rows(
    rows: Sequence[NDArray[np.int64]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one batch (B, L) on a device, padded on the right, and their lengths (B,)."""
    lengths_B = torch.tensor([len(row) for row in rows])
    tokens_BL = np.full((len(rows), int(lengths_B.max())), pad_id, dtype=np.int64)
    for i, row in enumerate(rows):
        tokens_BL[i, : len(row)] = row
    return torch.from_numpy(tokens_BL).to(device), lengths_B


def ids_array(ids: Ids) -> NDArray[np.integer]:
    """Ids as an array of one dimension. Raises: UserError for another shape."""
    array = ids.cpu().numpy() if isinstance(ids, torch.Tensor) else np.asanyarray(ids)
    if array.ndim != 1:
        raise UserError(f"token ids of shape {array.shape}: one dimension expected")
    return array.astype(np.int64) if array.size == 0 else array


def check_ids(model: LanguageModel, ids: NDArray[np.integer]) -> None:
    """Raise UserError if an id has no logit: the data then belong to another tokenizer."""
    limit = model.config.n_predicted
    for start in range(0, len(ids), _CHECK):
        part = ids[start : start + _CHECK]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise UserError(
                f"token id {wrong} is outside the model's vocabulary 0..{limit - 1}; "
                "prepare the data with the tokenizer of the checkpoint"
            )


def check_batch_size(batch_size: int) -> int:
    """The number of windows per forward pass. Raises: UserError unless it is at least 1."""
    if batch_size < 1:
        raise UserError(f"batch size {batch_size}: must be 1 or more")
    return min(batch_size, sys.maxsize)  # islice takes no more


def _batches(work: list[tuple[int, Window]], size: int) -> Iterator[list[tuple[int, Window]]]:
    return (work[start : start + size] for start in range(0, len(work), size))


@contextmanager
def progress_bar(total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a progress bar on standard error, or does nothing."""
    if not progress:
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scoring tokens", total=total)
        yield lambda tokens: bar.advance(task, tokens)
