"""Loss of a model on text, scored with sliding windows.

A stream of text is scored as a whole; an end-of-text mark in front of it is context, so that every token is scored.
"""

import hashlib
import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import hrmlm
from hrmlm.data import pieces
from hrmlm.errors import UserError
from hrmlm.evaluation.report import EndMarks, LossReport, show
from hrmlm.evaluation.scoring import DocumentScore, Ids, StreamScore, score_documents, score_stream, score_tokens
from hrmlm.evaluation.words import count_words
from hrmlm.models.base import LanguageModel
from hrmlm.parallel import ALONE, Parallel
from hrmlm.steps import StepCounts, depth_keywords, halting_rule

if TYPE_CHECKING:
    from hrmlm.data.tokenizer import Tokenizer
    from hrmlm.data.tokens import PreparedData

__all__ = [
    "DocumentScore",
    "EndMarks",
    "LossReport",
    "StreamScore",
    "evaluate_data",
    "evaluate_file",
    "evaluate_ids",
    "score_documents",
    "score_stream",
    "score_tokens",
    "show",
]

RULE = (
    "the tokens are one stream with an end-of-text mark in front as context; window k starts at token k * stride and "
    "reads at most `window` tokens, also across the borders of documents; each token is scored once, by the first "
    "window that predicts it; end-of-text marks inside the stream are scored apart and enter neither the total nor the "
    "tokens nor the bytes; words are separated by white space"
)


def evaluate_ids(
    model: LanguageModel,
    ids: Ids,
    tokenizer: "Tokenizer",
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    depth: int | None = None,
    halt_threshold: float | None = None,
    exit: str | None = None,
    cache_policy: str | None = None,
    first_tokens: int | None = None,
    data: str | None = None,
    data_path: str | None = None,
    split: str | None = None,
    checkpoint: str | None = None,
    progress: bool = False,
    parallel: Parallel = ALONE,
) -> LossReport:
    """Loss on a stream of ids. An end-of-text mark is put in front as context, so that every id given is scored.

    The settings up to cache_policy, progress and parallel: as in `score_stream`. first_tokens:
    look at so many ids only. The rest are names for the report; data: a fingerprint (None: one of the ids).
    Raises: UserError for bad settings or ids that the model cannot predict.
    """
    window = model.config.context if window is None else window
    stride = window if stride is None else stride
    _check_tokenizer(tokenizer, ids := np.asarray(ids[:first_tokens]))
    run = depth_keywords(model, depth, halt_threshold, exit)
    stream = np.concatenate([[tokenizer.end_of_text], ids]).astype(np.int64)
    nats, steps, positions = score_stream(
        model,
        stream,
        window=window,
        stride=stride,
        batch_size=batch_size,
        depth=depth,
        halt_threshold=halt_threshold,
        exit=exit,
        cache_policy=cache_policy,
        progress=progress,
        parallel=parallel,
    )
    bytes_per_token = tokenizer.token_bytes[stream[1:]]
    text = bytes_per_token > 0
    parameter = next(model.parameters())
    rule, threshold = halting_rule(model, **run)
    return LossReport(
        total_nats=float(nats[text].sum()),
        tokens=int(text.sum()),
        bytes=int(bytes_per_token.sum()),
        words=count_words(tokenizer, stream[1:]),
        end_marks=EndMarks(count=int((~text).sum()), nats=float(nats[~text].sum())),
        window=window,
        stride=stride,
        batch_size=batch_size,
        depth=run["depth"],
        schedule=tuple(application.name for application in model.schedule(run["depth"])),
        halting=rule,
        halt_threshold=threshold,
        exit=exit,
        cache_policy=cache_policy,
        steps=None if steps is None else StepCounts.of(steps[text], positions[text]),
        first_tokens=first_tokens,
        precision=_precision(parameter),
        device=_device(parameter.device),
        tokenizer=tokenizer.fingerprint,
        data=data or _fingerprint(stream[1:].tobytes()),
        data_path=data_path,
        split=split,
        checkpoint=checkpoint,
        rule=RULE,
        hrmlm_version=hrmlm.__version__,
        torch_version=torch.__version__,
    )


def evaluate_data(model: LanguageModel, data: "PreparedData", split: str = "valid", **settings: Any) -> LossReport:
    """Loss on a split of prepared data. `settings`: as in `evaluate_ids`.

    Raises: UserError for a missing split, bad settings, or data of another tokenizer.
    """
    report = evaluate_ids(
        model, data.split(split), data.tokenizer, split=split, **{"data": data.meta.fingerprint, **settings}
    )
    return _finite(report)


def _finite(report: LossReport) -> LossReport:
    if not math.isfinite(report.total_nats + report.end_marks.nats):
        raise UserError("the model's predictions are not finite numbers: its weights are damaged or training diverged")
    return report


def evaluate_file(model: LanguageModel, path: str | Path, tokenizer: "Tokenizer", **settings: Any) -> LossReport:
    """Loss on a UTF-8 text file, scored as one document without an end mark. `settings`: as in `evaluate_ids`.

    Raises: UserError for a missing, empty or undecodable file (with the byte offset), or bad settings.
    """
    path = Path(path)
    content = _read(path)
    ids = _encode(tokenizer, content.decode())
    names = {"data": _fingerprint(content), "data_path": str(path)}
    return _finite(evaluate_ids(model, ids, tokenizer, **{**names, **settings}))


def file_ids(path: str | Path, tokenizer: "Tokenizer") -> NDArray[np.integer]:
    """Ids of a UTF-8 text file, as `evaluate_file` scores them. Raises: UserError for a file that it would refuse."""
    return _encode(tokenizer, _read(Path(path)).decode())


def _read(path: Path) -> bytes:
    """Content of a UTF-8 text file with something in it. Raises: UserError naming the file (and byte offset)."""
    try:
        content = path.read_bytes()
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {error.start}; give a UTF-8 text file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not content:
        raise UserError(f"{path} is empty: nothing to evaluate")
    return content


def _encode(tokenizer: "Tokenizer", text: str) -> NDArray[np.integer]:
    """Ids of a text, some pieces at a time: the encodings of all at once would take many times its size."""
    parts = pieces.cut([text]) if tokenizer.cuts_safely else iter([text])
    arrays = []
    while group := list(islice(parts, 8)):
        arrays += tokenizer.encode_arrays(group)
    return np.concatenate(arrays)


def _check_tokenizer(tokenizer: "Tokenizer", ids: NDArray[np.integer]) -> None:
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise UserError(
            f"token id {int(ids.max())} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}; "
            "use the tokenizer that made the ids"
        )


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _precision(parameter: torch.Tensor) -> str:
    """Data type of the weights, and that of autocast where it is on."""
    precision = str(parameter.dtype).removeprefix("torch.")
    kind = parameter.device.type
    if torch.is_autocast_enabled(kind):
        precision += f", autocast {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
    return precision


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
