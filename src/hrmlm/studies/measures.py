"""Further measurements of a run's final model: the roles of its modules, and its latency and memory.

All of them read the model's schedule, so that they mean the same for every family.
"""

import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hrmlm.data.tokens import PreparedData
from hrmlm.evaluation.cost import cost
from hrmlm.evaluation.loss import evaluate_data
from hrmlm.evaluation.timing import interleaved
from hrmlm.models.base import LanguageModel, evaluating

TOKENS = 16_384
"""Tokens of the split that the roles are measured on."""
ROUNDS, WARMUP = 9, 2


@contextmanager
def frozen(model: LanguageModel, module: str) -> Iterator[None]:
    """Within the block, a module of the schedule leaves the state it is given unchanged (its first argument)."""

    def keep(_: Any, arguments: tuple[Any, ...], output: Any) -> Any:
        return (arguments[0], *(None for _ in output[1:])) if isinstance(output, tuple) else arguments[0]

    handle = model.get_submodule(module).register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def zero_input(model: LanguageModel) -> Iterator[None]:
    """Within the block, every token is embedded as zero."""
    handle = model.embedding.register_forward_hook(lambda _module, _arguments, output: torch.zeros_like(output))
    try:
        yield
    finally:
        handle.remove()


def roles(model: LanguageModel, data: PreparedData, split: str, window: int, batch_size: int) -> dict[str, Any]:
    """What the parts of a model do on the first tokens of a split.

    loss: nats per token as trained; loss_frozen: with one module of the schedule frozen, by module (of at most 8);
    loss_at_depth: read out after so many cycles or steps; applications: by name, mean root mean square of the new
    state, relative change of the state, and gate (share kept; None without one) on text, and the gate on zero input.
    """

    def loss(**settings: Any) -> float:
        report = evaluate_data(
            model, data, split, window=window, batch_size=batch_size, first_tokens=TOKENS, **settings
        )
        assert report.nats_per_token is not None
        return report.nats_per_token

    modules = Counter(application.module for application in model.schedule())
    losses = {}
    for module in list(modules)[:8]:
        with frozen(model, module):
            losses[module] = loss()
    ids = data.split(split)
    rows = max(1, min(batch_size, len(ids) // window))
    tokens_BL = torch.as_tensor(ids[: rows * window].astype("int64")).view(rows, -1).to(model.embedding.weight.device)
    text = _stats(model, tokens_BL)
    with zero_input(model):
        nothing = _stats(model, tokens_BL[:1])
    return {
        "tokens": TOKENS,
        "loss": loss(),
        "loss_frozen": losses,
        "loss_at_depth": {str(depth): loss(depth=depth) for depth in range(1, model.trained_depth + 1)},
        "applications": [
            {"name": name, **values, "gate_on_zero_input": nothing[name]["gate"]} for name, values in text.items()
        ],
    }


def _stats(model: LanguageModel, tokens_BL: Tensor) -> dict[str, dict[str, float | None]]:
    """Means per application."""
    with evaluating(model):
        stats = model(tokens_BL, stats=True).stats
    return {
        item.name: {
            "rms": float(item.rms_BL.mean()),
            "change": float(item.change_BL.mean()),
            "gate": None if item.gate_BL is None else float(item.gate_BL.mean()),
        }
        for item in stats or []
    }


def latency(model: LanguageModel, length: int) -> dict[str, Any]:
    """Time and memory of one sequence of `length` tokens, batch 1.

    recompute_ms: one forward pass over all of them, which is what a token costs without a cache; cached_ms: one more
    token with the others in the cache; medians of rounds, with the spread (max − min) / median. forward_peak_bytes:
    what the forward pass needs at most beside the weights, None on the CPU.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens_1L = torch.randint(0, model.config.n_predicted, (1, length), generator=generator).to(device)
    read_1 = torch.tensor([length - 1])
    with evaluating(model):
        peak = _peak_bytes(lambda: model(tokens_1L, read_B=read_1), device)
        cache = model.new_cache(1, length)
        if length > 1:
            model(tokens_1L[:, :-1], cache=cache)
        lengths_B = cache.lengths_B.clone()

        def step() -> None:
            cache.lengths_B = lengths_B.clone()
            model(tokens_1L[:, -1:], cache=cache)

        calls: dict[str, Callable[[], object]] = {"recompute": lambda: model(tokens_1L, read_B=read_1), "cached": step}
        timings = interleaved(calls, iterations=ROUNDS, warmup=WARMUP, device=device)
    report = cost(model, length)
    name = str(model.embedding.weight.dtype).removeprefix("torch.")
    return {
        "length": length,
        "rounds": ROUNDS - WARMUP,
        "recompute_ms": 1e3 * timings["recompute"].median,
        "recompute_spread": timings["recompute"].spread,
        "cached_ms": 1e3 * timings["cached"].median,
        "cached_spread": timings["cached"].spread,
        "weight_bytes": report.weight_bytes[name],
        "kv_cache_bytes": report.kv_cache_bytes_per_token[name] * length,
        "forward_peak_bytes": peak,
        "precision": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
    }


def _peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory that a call needs above what is in use before it.

    None on the CPU: its allocator keeps what was freed, so that the system sees no growth.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def peak_process_bytes() -> int:
    """Most memory that this process has had, libraries included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
