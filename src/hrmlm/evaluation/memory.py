"""What a memory does: its levels, how far back information survives, and long documents with and without it.

Documents longer than the training window are read from their beginning with the memory carried all the way, with none
of it carried (every segment reads M_0), with one level carried alone, and with the memory reset at the end of every
training window. The differences between the losses of the same tokens are what the memory is worth.

Shapes: B documents, L positions, S slots.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

import hrmlm
from hrmlm.errors import UserError
from hrmlm.evaluation.picture import pyplot
from hrmlm.files import write_json
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.models.memory import MemoryMonitor, MemoryState

if TYPE_CHECKING:
    from rich.console import Console

    from hrmlm.data.tokenizer import Tokenizer

FURTHEST = (1, 2, 4, 8, 16)
"""Upper ends of the groups of distances, in segments; one more for all that is further."""


@dataclass(frozen=True)
class Level:
    """One level of the memory. norm: mean L2 norm of its slots after a segment; gate: mean openness of its write gates;
    read_share: of the attention of all reads; gain: nats per token that carrying this level alone saves."""

    slots: int
    norm: float
    gate: float
    read_share: float
    gain: float


@dataclass(frozen=True)
class Group:
    """Loss of some tokens, in nats per token. carried: with the whole memory; none: with none of it carried; levels:
    with one level carried alone."""

    name: str
    tokens: int
    carried: float
    none: float
    levels: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class PositionGroup:
    """Loss of the tokens from position `start` to before `end` of their document, in nats per token. carried: memory
    from the beginning of the document; reset: from the beginning of the training window; error: standard error of the
    mean difference, documents taken as independent (NaN for a single one)."""

    start: int
    end: int
    tokens: int
    carried: float
    reset: float
    error: float


@dataclass(frozen=True)
class MemoryProbe:
    """The result. distances: tokens by how many segments ago their id was last mentioned before their own segment;
    positions: window by window; later: all positions beyond the first window together."""

    levels: list[Level]
    distances: list[Group]
    positions: list[PositionGroup]
    later: PositionGroup
    documents: int
    tokens: int
    window: int
    segment: int
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def beyond(self) -> tuple[float, float]:
        """Nats per token that carrying saves on positions beyond the first window, and the standard error."""
        return self.later.reset - self.later.carried, self.later.error

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON."""
        gain, error = self.beyond
        whole = {**asdict(self), "gain_beyond_window": gain, "gain_error": error, "hrmlm_version": hrmlm.__version__}
        return _without_nan(whole)


def read_ids(data: Path, split: str, tokenizer: "Tokenizer") -> NDArray[np.integer]:
    """Ids of prepared data or of a text file. Raises: UserError for data of another tokenizer."""
    from hrmlm.data.tokens import PreparedData
    from hrmlm.evaluation.loss import file_ids

    if not data.is_dir():
        return file_ids(data, tokenizer)
    prepared = PreparedData.open(data)
    if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"the checkpoint has tokenizer {tokenizer.fingerprint} and {data} was prepared with "
            f"{prepared.tokenizer.fingerprint}; prepare the text with the checkpoint's tokenizer.json"
        )
    return prepared.split(split)[:]


def long_documents(ids: NDArray[np.integer], end: int, window: int, length: int, tokens: int) -> list[NDArray[Any]]:
    """Documents of more than `window` tokens, an end mark in front of each; what is longer than `length` is cut into
    documents of that length. Together at most `tokens` tokens, the first ones."""
    found, left = [], tokens
    borders = np.flatnonzero(ids == end)
    for start, stop in zip([0, *(borders + 1)], [*borders, len(ids)], strict=True):
        for first in range(start, stop, length):
            document = np.asarray(ids[first : min(first + length, stop)], dtype=np.int64)[: max(left, 0)]
            if len(document) > window:
                found.append(np.concatenate([[end], document]))
                left -= len(document)
    return found


def probe_memory(
    model: LanguageModel,
    ids: NDArray[np.integer],
    end: int,
    *,
    window: int | None = None,
    length: int | None = None,
    tokens: int = 65_536,
    batch_size: int = 16,
    names: dict[str, Any] | None = None,
) -> MemoryProbe:
    """Study a model with a memory on a stream of ids whose documents are followed by `end`.

    window: tokens of a training window (None: the model's context). length: documents are cut here (None: 16 windows).
    Raises: UserError for other models, bad settings, or data without a document longer than the window.
    """
    if not model.carries_state or not isinstance(probe := model.new_state(1), MemoryState):
        raise UserError(f"a {model.config.family} model has no memory to look into; see hrmlm probe depth")
    window = model.config.context if window is None else window
    length = 16 * window if length is None else length
    C = probe.segment
    if window < 1 or window % C:
        raise UserError(
            f"window {window} must be a multiple of the model's segment, {C}; give --window {max(window // C, 1) * C}"
        )
    if length <= window:
        raise UserError(f"length {length} must exceed the window, {window}: shorter documents need no memory beyond it")
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} must be at least 1")
    documents = long_documents(ids, end, window, length, tokens)
    if not documents:
        raise UserError(f"there is no document longer than the window of {window} tokens among the first {tokens:,}")
    slots = model.config.slots
    level_S = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(slots))
    monitor, shares = MemoryMonitor(slots), list[torch.Tensor]()
    with evaluating(model):
        carried = _score(model, documents, batch_size, monitor=monitor, shares=shares)
        none = _score(model, documents, batch_size, held_S=torch.ones_like(level_S, dtype=torch.bool))
        alone = [_score(model, documents, batch_size, held_S=level_S != level) for level in range(len(slots))]
        windows = [part for document in documents for part in _windows(document, window)]
        reset = iter(_score(model, windows, batch_size))
        joined = [np.concatenate([next(reset) for _ in _windows(document, window)]) for document in documents]
    total, longest = (combine(len(nats) for nats in carried) for combine in (sum, max))
    return MemoryProbe(
        _levels(model, monitor, shares, none, alone, total),
        _distances(documents, C, carried, none, alone),
        [_positions(carried, joined, start, start + window) for start in range(0, longest, window)],
        _positions(carried, joined, window, longest),
        len(documents),
        total,
        window,
        C,
        names or {},
    )


def _windows(document: NDArray[Any], window: int) -> list[NDArray[Any]]:
    """Inputs and targets of every training window: neighbours share one id."""
    return [document[start : start + window + 1] for start in range(0, len(document) - 1, window)]


def _score(
    model: LanguageModel,
    documents: Sequence[NDArray[Any]],
    batch_size: int,
    held_S: torch.Tensor | None = None,
    monitor: MemoryMonitor | None = None,
    shares: list[torch.Tensor] | None = None,
) -> list[NDArray[np.float64]]:
    """Nats of documents[i][1:], each document read from its own beginning. held_S: slots that stay M_0."""
    device = next(model.parameters()).device
    results = []
    for first in range(0, len(documents), batch_size):
        rows = documents[first : first + batch_size]
        longest = max(len(row) for row in rows)
        ids_BL = torch.from_numpy(np.stack([np.pad(row, (0, longest - len(row))) for row in rows])).to(device)
        state = model.new_state(len(rows))
        assert isinstance(state, MemoryState)
        state.held_S = None if held_S is None else held_S.to(device)
        state.monitor, state.shares = monitor, shares
        left_B = torch.tensor([len(row) - 1 for row in rows])
        pieces = []
        for start in range(0, longest - 1, state.segment):
            inputs_BN = ids_BL[:, start : min(start + state.segment, longest - 1)]
            targets_BN = ids_BL[:, start + 1 : start + 1 + inputs_BN.shape[1]]
            real_B = (left_B - start).clamp(0, inputs_BN.shape[1])
            logits = model(inputs_BN, cache=state, lengths_B=real_B).logits
            pieces.append(F.cross_entropy(logits.transpose(1, 2), targets_BN, reduction="none").double().cpu())
        nats_BL = torch.cat(pieces, dim=1).numpy()
        results += [nats_BL[i, : len(row) - 1] for i, row in enumerate(rows)]
    return results


def _levels(
    model: LanguageModel,
    monitor: MemoryMonitor,
    shares: list[torch.Tensor],
    none: list[NDArray[np.float64]],
    alone: list[list[NDArray[np.float64]]],
    total: int,
) -> list[Level]:
    seen, slots = monitor.values(), model.config.slots
    read = [float(part.sum()) for part in torch.stack(shares).mean(0).split(list(slots))]
    base = sum(float(nats.sum()) for nats in none)
    levels = []
    for place, n in enumerate(slots):
        size = seen["memory_rms"][str(place + 1)] * model.config.d_model**0.5
        gain = (base - sum(float(nats.sum()) for nats in alone[place])) / total
        levels.append(Level(n, size, seen["memory_gate"][str(place + 1)], read[place], gain))
    return levels


def distances(document: NDArray[Any], segment: int) -> NDArray[np.int64]:
    """For each of document[1:] how many segments before its own its id was last mentioned: 0 within the same segment
    (of the inputs, so that attention sees it), −1 never."""
    last: dict[int, int] = {}
    found = np.empty(len(document) - 1, dtype=np.int64)
    for place, token in enumerate(document[1:].tolist()):
        last[int(document[place])] = place // segment
        found[place] = place // segment - last[token] if token in last else -1
    return found


def _distances(
    documents: Sequence[NDArray[Any]],
    segment: int,
    carried: list[NDArray[np.float64]],
    none: list[NDArray[np.float64]],
    alone: list[list[NDArray[np.float64]]],
) -> list[Group]:
    of_tokens = np.concatenate([distances(document, segment) for document in documents])
    whole, without = np.concatenate(carried), np.concatenate(none)
    by_level = [np.concatenate(nats) for nats in alone]
    masks = {"never before": of_tokens == -1, "same segment": of_tokens == 0}
    below = 0
    for upper in FURTHEST:
        name = str(upper) if upper == below + 1 else f"{below + 1}-{upper}"
        masks[name] = (of_tokens > below) & (of_tokens <= upper)
        below = upper
    masks[f"over {below}"] = of_tokens > below
    return [
        Group(
            name,
            int(mask.sum()),
            float(whole[mask].mean()),
            float(without[mask].mean()),
            [float(nats[mask].mean()) for nats in by_level],
        )
        for name, mask in masks.items()
        if mask.any()
    ]


def _positions(
    carried: list[NDArray[np.float64]], reset: list[NDArray[np.float64]], start: int, end: int
) -> PositionGroup:
    """Positions from `start` to before `end`; the tokens of a document count as one observation, however many."""
    pairs = [(a[start:end], b[start:end]) for a, b in zip(carried, reset, strict=True) if len(a) > start]
    whole, windowed = (np.concatenate(part) for part in zip(*pairs, strict=True))
    sums = np.array([float((b - a).sum()) - len(a) * float((windowed - whole).mean()) for a, b in pairs])
    error = float((sums**2).sum() ** 0.5 / len(whole)) if len(pairs) > 1 else float("nan")
    end = start + max(len(a) for a, _ in pairs)
    return PositionGroup(start, end, len(whole), float(whole.mean()), float(windowed.mean()), error)


def show(result: MemoryProbe, console: "Console") -> None:
    """Print the three tables for people, and what they say about carrying the memory."""
    from rich.table import Table

    table = Table("level", "slots", "norm", "gate", "read share", "saves alone", title="Levels", title_justify="left")
    for place, level in enumerate(result.levels, start=1):
        cells = (f"{level.norm:.3f}", f"{level.gate:.4f}", f"{level.read_share:.3f}", f"{level.gain:+.4f}")
        table.add_row(str(place), str(level.slots), *cells)
    console.print(table)
    table = Table("last mentioned", "tokens", "carried", "none", "saved", title="Distance in segments")
    table.title_justify = "left"
    for group in result.distances:
        losses = (f"{group.carried:.4f}", f"{group.none:.4f}", f"{group.none - group.carried:+.4f}")
        table.add_row(group.name, f"{group.tokens:,}", *losses)
    console.print(table)
    table = Table("positions", "tokens", "carried", "reset", "saved", title="Long documents", title_justify="left")
    for part in result.positions:
        where = f"{part.start}-{part.end - 1}"
        pair = (f"{part.carried:.4f}", f"{part.reset:.4f}")
        saved = f"{part.reset - part.carried:+.4f} {_error(part.error)}"
        table.add_row(where, f"{part.tokens:,}", *pair, saved)
    console.print(table)
    gain, error = result.beyond
    verdict = "helps" if gain > 2 * error else "helps at most a little" if gain > 0 else "does not help"
    if math.isnan(error):
        verdict = "cannot be judged from one document"
    console.print(
        f"{result.documents} documents, {result.tokens:,} tokens, segments of {result.segment}, window "
        f"{result.window}. Carrying the memory beyond the window {verdict}: {gain:+.4f} {_error(error)} nats per "
        "token.",
        highlight=False,
    )


def _without_nan(value: Any) -> Any:
    """The same with None for what is not a number (an error of a single document): JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _error(error: float) -> str:
    return "± unknown (one document)" if math.isnan(error) else f"± {error:.4f}"


def write(result: MemoryProbe, directory: Path) -> Path:
    """Write memory.json and the picture memory.png into a directory; return the picture. Raises: UserError."""
    plots = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "memory.json", result.to_dict())
    figure, (left, right) = plots.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    groups = [group for group in result.distances if group.name not in ("never before", "same segment")]
    places = range(len(groups))
    left.plot(places, [g.none - g.carried for g in groups], "o-", color="C3", label="whole memory")
    for level in range(len(result.levels)):
        saved = [g.none - g.levels[level] for g in groups]
        left.plot(places, saved, "s--", ms=4, lw=1, color=f"C{level}", label=f"level {level + 1} alone")
    left.axhline(0, color="grey", lw=0.8)
    left.set_xticks(list(places), [group.name for group in groups])
    left.set(xlabel="last mentioned so many segments ago", ylabel="nats per token saved", title="How far back")
    middle = [(part.start + part.end) / 2 for part in result.positions]
    right.plot(middle, [part.carried for part in result.positions], "o-", ms=4, label="memory carried")
    right.plot(middle, [part.reset for part in result.positions], "s-", ms=4, label="reset every window")
    right.set(xlabel="position in the document", ylabel="nats per token", title="Long documents")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(directory / "memory.png", dpi=150)
    plots.close(figure)
    return directory / "memory.png"
