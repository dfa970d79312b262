"""What a model costs: parameters, weight bytes, FLOPs and cache bytes, read from its schedule without allocating it.

The rule for FLOPs: 2 per multiply-add of every matrix product, nothing for the rest (norms, gates, softmax, rotations).
Causal attention at length L counts the keys that each query may see, (L + 1) / 2 on average. The backward pass costs
twice the forward pass, for the applications inside the gradient window and the head; recomputation is not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hrmlm.errors import UserError
from hrmlm.models import ModelConfig, build_model
from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import Application, Attention

if TYPE_CHECKING:
    from rich.console import Console

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class CostReport:
    """Costs of one model at sequences of `length` tokens, per token where it says so.

    parameters: trainable numbers, shared and tied ones once. weight_bytes: of all saved tensors, by data type.
    applications: block calls per token in evaluation, in order `schedule`; `applications_in_window` of them get
    gradient in training. kv_cache_bytes_*: of one sequence, by data type; `_context` at the full context.
    depth_is_learned: positions may stop earlier, so applications and FLOPs are the most there can be.
    """

    family: str
    parameters: int
    embedding_parameters: int
    weight_bytes: dict[str, int]
    applications: int
    applications_in_window: int
    schedule: list[str]
    passes: int
    length: int
    context: int
    forward_flops_per_token: float
    training_flops_per_token: float
    forward_attention_flops_per_token: float
    training_attention_flops_per_token: float
    kv_cache_bytes_per_token: dict[str, int]
    kv_cache_bytes_context: dict[str, int]
    depth_is_learned: bool

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Flops:
    """FLOPs per token of matrix products with weights, and of attention between tokens."""

    matmul: float = 0.0
    attention: float = 0.0

    def __add__(self, other: "_Flops") -> "_Flops":
        return _Flops(self.matmul + other.matmul, self.attention + other.attention)

    def __mul__(self, factor: float) -> "_Flops":
        return _Flops(factor * self.matmul, factor * self.attention)

    @property
    def total(self) -> float:
        return self.matmul + self.attention


def cost_of(
    settings: Mapping[str, Any] | ModelConfig, length: int | None = None, depth: int | None = None
) -> CostReport:
    """Costs of the model with these settings, built without memory for its weights. See `cost`."""
    with torch.device("meta"):
        model = build_model(settings)
    return cost(model, length, depth)


def cost(model: LanguageModel, length: int | None = None, depth: int | None = None) -> CostReport:
    """Costs of a model on any device (the meta device is enough).

    length: tokens per sequence (default: the context). depth: cycles or steps instead of the trained number. Of a model
    that learns its depth these are the costs of the most steps.
    Raises: UserError for a length outside 1..context.
    """
    context = model.config.context
    length = context if length is None else length
    if not 1 <= length <= model.sequence_limit:
        raise UserError(f"length {length}: must be from 1 to the model's context, {context}")
    schedule = model.schedule(depth)
    steps = model.trained_depth if depth is None else depth
    keys, _ = model.attended(length)
    blocks = {item.module: _module_flops(model.get_submodule(item.module), keys) for item in schedule}
    head = _Flops(2.0 * model.config.d_model * model.config.n_predicted)
    if (halting := getattr(model, "halting", None)) is not None:  # read once after each outer step
        head += _module_flops(halting, keys) * steps
    forward = sum((blocks[item.module] for item in schedule), head)
    forward += _Flops(*model.extra_flops(length, steps, training=False))
    training = head * (3.0 * model.n_passes) + _Flops(*model.extra_flops(length, steps, training=True))
    for item in schedule + _repeated_in_training(schedule, model.n_passes):
        training += blocks[item.module] * (3.0 if item.in_window else 1.0)
    values = model.cached_values(context, steps)
    growth = values - model.cached_values(context - 1, steps)
    return CostReport(
        family=model.config.family,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=model.embedding.weight.numel(),
        weight_bytes={name: size * _saved_values(model) for name, size in BYTES_PER_VALUE.items()},
        applications=len(schedule),
        applications_in_window=sum(item.in_window for item in schedule),
        schedule=[item.name for item in schedule],
        passes=model.n_passes,
        length=length,
        context=context,
        forward_flops_per_token=forward.total,
        training_flops_per_token=training.total,
        forward_attention_flops_per_token=forward.attention,
        training_attention_flops_per_token=training.attention,
        kv_cache_bytes_per_token={name: size * growth for name, size in BYTES_PER_VALUE.items()},
        kv_cache_bytes_context={name: size * values for name, size in BYTES_PER_VALUE.items()},
        depth_is_learned=model.learns_depth and depth is None,
    )


def _module_flops(module: nn.Module, keys_per_query: float) -> _Flops:
    """Of one application of a module, per token of a sequence in which a token sees so many keys on average."""
    weights = sum(part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))
    heads = sum(part.n_heads * part.head_dim for part in module.modules() if isinstance(part, Attention))
    return _Flops(matmul=2.0 * weights, attention=2 * 2.0 * heads * keys_per_query)  # scores, and mixing of values


def _repeated_in_training(schedule: Sequence[Application], passes: int) -> list[Application]:
    """Applications that evaluation shares between supervision passes and training runs again in each later one."""
    later = {item.module for item in schedule if item.supervision_pass > 0}
    return [item for item in schedule if item.supervision_pass == 0 and item.module not in later] * (passes - 1)


def _saved_values(model: nn.Module) -> int:
    """Numbers in the saved weights; tied tensors are saved once."""
    tensors = {id(value): value for value in model.state_dict(keep_vars=True).values()}
    return sum(value.numel() for value in tensors.values())


def show(report: CostReport, console: "Console", name: str | None = None) -> None:
    """Print the report as a table for people."""
    from rich.markup import escape
    from rich.table import Table

    title = escape(f"{name or report.family} at {report.length:,} tokens per sequence")
    table = Table(title=title, title_justify="left")
    table.add_column("cost")
    table.add_column("value", justify="right")
    for row in _lines(report):
        table.add_row(*row)
    console.print(table)
    console.print(f"Schedule: {_compress(report.schedule)}.")
    console.print("FLOPs: 2 per multiply-add of matrix products; backward = 2 x forward inside the window.")


def _lines(report: CostReport) -> list[tuple[str, str]]:
    """Rows of the table."""
    window = f"{report.applications_in_window} of {report.applications}"
    most = " (at most)" if report.depth_is_learned else ""
    lines = [
        ("parameters", f"{report.parameters:,} ({_short(report.parameters)})"),
        ("  of these in the embedding", f"{report.embedding_parameters:,}"),
        *((f"weights, {dtype}", f"{size / 1e6:,.2f} MB") for dtype, size in report.weight_bytes.items()),
        (f"block applications per token{most}", f"{report.applications}"),
        ("  in the gradient window", window),
        (f"forward FLOPs per token{most}", _short(report.forward_flops_per_token)),
        (f"training FLOPs per token{most}", _short(report.training_flops_per_token)),
    ]
    for dtype, size in report.kv_cache_bytes_per_token.items():
        full = report.kv_cache_bytes_context[dtype]
        if not size:  # a memory instead of the text
            lines.append((f"state at any length, {dtype}", f"{full / 1024:,.1f} KiB"))
            continue
        lines.append((f"KV cache per token, {dtype}", f"{size / 1024:,.1f} KiB"))
        lines.append((f"KV cache at {report.context:,} tokens, {dtype}", f"{full / 2**20:,.1f} MiB"))
    return lines


def _short(value: float) -> str:
    """A number with a decimal prefix: 1229300000 -> "1.229 G"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.4g} {prefix}"
    return f"{value:g}"


def _compress(schedule: list[str]) -> str:
    """The names in order without their numbers, runs counted: "input, 2 x fast, slow, 2 x fast, slow"."""
    words = ((word, len(list(run))) for word, run in groupby(name.split(" ")[0] for name in schedule))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in words)
