"""How often a smaller depth says what the model as trained says: what decides the speed of drafting and early exit.

Shape letters: B batch, L positions, V vocabulary, S scored positions of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hrmlm.evaluation.scoring import Ids, check_batch_size, check_ids, ids_array, padded_rows, progress_bar
from hrmlm.evaluation.windows import check_window, plan_windows
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.steps import check_depth

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Agreement:
    """A depth compared with the model as trained, over `positions` predictions of the same text.

    greedy: share of the positions at which both find the same token most likely; acceptance: mean of Σ_v min(p_r, p_N),
    the probability that speculative sampling (Leviathan et al. 2023) at temperature 1 keeps a token drafted at this
    depth. Both are about one token after a text that is given, not about a whole draft.
    """

    positions: int
    greedy: float
    acceptance: float

    def to_dict(self) -> dict[str, float]:
        """As values for JSON."""
        return asdict(self)


def agreements(
    model: LanguageModel,
    ids: Ids,
    depths: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    progress: bool = False,
) -> dict[int, Agreement]:
    """Agreement of each depth with the model as trained, on a stream of ids; nothing for an empty stream.

    Windows, settings and the positions that count are those of `score_stream`: the predictions of ids[1:], end-of-text
    marks included.

    Raises: UserError as `score_stream` does.
    """
    for depth in depths:
        check_depth(model, depth, None)
    window = model.config.context if window is None else window
    stride = window if stride is None else stride
    check_window(window, stride, model.config.context)
    check_ids(model, ids := ids_array(ids))
    check_batch_size(batch_size)
    positions = max(len(ids) - 1, 0)
    if not positions:
        return {}
    same, kept = dict.fromkeys(depths, 0), dict.fromkeys(depths, 0.0)
    windows = plan_windows(len(ids), window, stride)
    device = next(model.parameters()).device
    with evaluating(model), progress_bar(positions, progress) as advance:
        while batch := list(islice(windows, check_batch_size(batch_size))):
            rows = [np.asarray(ids[item.start : item.end], dtype=np.int64) for item in batch]
            tokens_BL, lengths_B = padded_rows(rows, 0, device)
            scored = [slice(item.first - 1 - item.start, item.end - item.start) for item in batch]
            trained_BLV = model(tokens_BL, lengths_B=lengths_B).logits
            for depth in depths:
                early_BLV = model(tokens_BL, lengths_B=lengths_B, depth=depth).logits
                for early_LV, trained_LV, place in zip(early_BLV, trained_BLV, scored, strict=True):
                    greedy, overlap = _compare(early_LV[place], trained_LV[place])
                    same[depth] += greedy
                    kept[depth] += overlap
            advance(sum(place.stop - place.start for place in scored))
    return {depth: Agreement(positions, same[depth] / positions, kept[depth] / positions) for depth in depths}


def show_agreements(found: Mapping[int, Agreement], console: "Console") -> None:
    """Print the table for people, one line per depth."""
    from rich.table import Table

    table = Table(title="Agreement of fixed depths with the model as trained", title_justify="left")
    for column in ("depth", "same token", "accepted"):
        table.add_column(column, justify="right")
    for depth, agreement in found.items():
        table.add_row(str(depth), f"{agreement.greedy:.1%}", f"{agreement.acceptance:.1%}")
    console.print(table)
    console.print(
        "Same token: share of positions with the same most likely token; accepted: probability that speculative "
        "sampling keeps a token drafted at this depth."
    )


def _compare(early_SV: Tensor, trained_SV: Tensor) -> tuple[int, float]:
    """Positions with the same most likely token, and Σ over positions of Σ_v min(p_r, p_N)."""
    greedy = int((early_SV.argmax(-1) == trained_SV.argmax(-1)).sum())
    overlap = torch.minimum(early_SV.softmax(-1), trained_SV.softmax(-1)).sum(-1)
    return greedy, float(overlap.double().sum())
