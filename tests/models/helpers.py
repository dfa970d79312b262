"""Small models and observations of them, shared by the property tests. Nothing here names a family."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hrmlm.data.batch import IGNORE, Batch
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, build_model
from tests.families import FAMILIES


def build(name: str, *, seed: int = 0, **changes: Any) -> LanguageModel:
    """The family row `name` with some settings changed, in evaluation mode."""
    torch.manual_seed(seed)
    return build_model({**FAMILIES[name], **changes}).eval()


def lively(model: LanguageModel, seed: int = 1) -> LanguageModel:
    """Weights as large as in a trained model: fresh ones are so small that a leak or a lost path might stay hidden."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
            else:
                # Gates that decay slowly: a memory that is rewritten with every segment enlarges rounding without end.
                middle = 1.0 if "norm" in name else -3.0 if "gate_biases" in name else 0.0
                tensor.copy_(0.3 * noise + middle)
    return model


def lively_model(name: str, **changes: Any) -> LanguageModel:
    """`build` and `lively` in one."""
    return lively(build(name, **changes))


def random_tokens(model: LanguageModel, rows: int, length: int, seed: int = 2) -> Tensor:
    """Ids (rows, length) from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator)


def random_batch(model: LanguageModel, rows: int = 2, length: int = 8, ignored: int = 0, seed: int = 2) -> Batch:
    """A batch whose targets are the following tokens, the first `ignored` ones of every row not scored."""
    tokens = random_tokens(model, rows, length + 1, seed) % model.config.n_predicted
    targets = tokens[:, 1:].clone()
    targets[:, :ignored] = IGNORE
    return Batch(tokens[:, :-1], targets)


def depths(model: LanguageModel) -> list[int]:
    """1 to the trained depth, and one more where the model can."""
    trained = model.trained_depth
    try:
        model.schedule(trained + 1)
    except UserError:
        return list(range(1, trained + 1))
    return list(range(1, trained + 2))


@torch.no_grad()
def observe(
    model: LanguageModel, tokens_BL: Tensor, depth: int | None = None, chunks: list[int] | None = None
) -> dict[str, Tensor]:
    """Logits and statistics of every application, each (B, L, ...).

    chunks: feed through a cache, in pieces of these lengths (None: no cache).
    """
    if chunks is None:
        return _named(model(tokens_BL, depth=depth, stats=True))
    assert sum(chunks) == tokens_BL.shape[1]
    cache = model.new_cache(tokens_BL.shape[0], tokens_BL.shape[1], depth=depth)
    pieces = [
        _named(model(piece_BL, cache=cache, depth=depth, stats=True)) for piece_BL in tokens_BL.split(chunks, dim=1)
    ]
    return {key: torch.cat([piece[key] for piece in pieces], dim=1) for key in pieces[0]}


def _named(out: Any) -> dict[str, Tensor]:
    seen = {"logits": out.logits}
    if out.steps_BL is not None:
        seen["steps_BL"] = out.steps_BL
    for index, record in enumerate(out.stats):
        for kind in ("rms_BL", "change_BL", "gate_BL"):
            if getattr(record, kind) is not None:
                seen[f"{index} {record.name} {kind}"] = getattr(record, kind)
    return seen


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    """Both observations have the same keys and, to tolerance, the same numbers."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], atol=atol, rtol=rtol, msg=lambda text, key=key: f"{key}: {text}")


def step(model: LanguageModel, batch: Batch, rng: Any = None) -> list[Any]:
    """Forward and backward of one training step as the trainer does it; gradients are left on the parameters."""
    partials = []
    for partial in model.losses(batch, rng):
        partial.objective.backward()
        partials.append(partial)
    return partials


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    """Gradients by parameter name; zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@contextmanager
def recorded_calls(model: LanguageModel) -> Iterator[dict[str, list[Tensor]]]:
    """Output states of every call of the scheduled modules, by module name, with their gradients retained."""
    calls: dict[str, list[Tensor]] = {}

    def hook(name: str):
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            if state.requires_grad:
                state.retain_grad()
            calls.setdefault(name, []).append(state)

        return keep

    names = {application.module for application in model.schedule()}
    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in sorted(names)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def reached(state: Tensor) -> bool:
    """Whether a gradient arrived at this output."""
    return state.requires_grad and state.grad is not None and bool((state.grad != 0).any())


class FixedExit:
    """Stands for a random generator: every training step ends at the same depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def random(self) -> float:
        """Below every positive probability."""
        return 0.0

    def randint(self, low: int, high: int) -> int:
        """The depth, which must be one that exit sampling can draw."""
        assert low <= self.depth <= high
        return self.depth
