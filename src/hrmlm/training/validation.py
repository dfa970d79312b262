"""The validation loss of a run, over one corpus or a mixture."""

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hrmlm.data.corpora import Corpora
from hrmlm.evaluation.loss import evaluate_ids
from hrmlm.evaluation.report import LossReport
from hrmlm.models import LanguageModel
from hrmlm.steps import StepCounts


@dataclass(frozen=True)
class Validation:
    """loss: nats per token. steps: of all tokens, of models that decide their depth. corpora: `loss` and
    `bits_per_byte` of each corpus of a mixture by name, else empty."""

    loss: float
    bits_per_byte: float | None
    steps: StepCounts | None
    corpora: dict[str, dict[str, float | None]]

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None beyond the range of a float."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else None


def validate(
    model: LanguageModel, data: Corpora, valid: Mapping[str, np.ndarray], window: int, **settings: Any
) -> Validation:
    """Loss on the ids of each corpus (`Corpora.valid_ids`), and together: the mean by the shares of the corpora.

    So the loss is what a token of the mixture costs on average, however long the validation splits are; bits per byte
    are those of such a mean token over its mean bytes. window: longest one. settings: as in `evaluate_ids`.
    """
    reports = {
        name: evaluate_ids(model, ids, data.tokenizer, window=min(window, len(ids)), **settings)
        for name, ids in valid.items()
    }
    if len(reports) == 1:
        (report,) = reports.values()
        return Validation(_loss(report), report.bits_per_byte, report.steps, {})
    weights = [float(weight) for weight in data.weights]
    pairs = list(zip(weights, reports.values(), strict=True))
    loss = sum(weight * _loss(report) for weight, report in pairs)
    size = sum(weight * report.bytes / report.tokens for weight, report in pairs if report.tokens)
    corpora = {name: {"loss": r.nats_per_token, "bits_per_byte": r.bits_per_byte} for name, r in reports.items()}
    bits = loss / math.log(2) / size if size else None
    return Validation(loss, bits, _together(reports.values()), corpora)


def _loss(report: LossReport) -> float:
    return math.nan if report.nats_per_token is None else report.nats_per_token


def _together(reports: Any) -> StepCounts | None:
    """The counts of all tokens that were scored."""
    total: Counter[int] = Counter()
    for report in reports:
        total.update(report.steps.histogram if report.steps else {})
    return StepCounts(dict(sorted(total.items()))) if total else None
