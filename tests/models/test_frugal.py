"""Losses in chunks and activations computed again change what is in memory, and nothing else."""

import math
import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hrmlm.data.batch import IGNORE, Batch, SoftTargets
from hrmlm.models import LanguageModel
from hrmlm.models.losses import in_chunks, text_loss
from tests.families import FAMILIES
from tests.models.helpers import gradients, lively_model, random_batch, step

EACH = pytest.mark.parametrize("name", FAMILIES)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that anything returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def taught(batch: Batch, vocabulary: int) -> Batch:
    logits_BLV = 2 * torch.randn(*batch.inputs_BL.shape, vocabulary, generator=torch.Generator().manual_seed(3))
    return Batch(batch.inputs_BL, batch.targets_BL, SoftTargets(logits_BLV, 2.0, 0.3))


def trained(model: LanguageModel, batch: Batch, seed: int = 5) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What one step tells of its losses, and its gradients."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    partials = step(model, batch, random.Random(seed))
    told = [{"objective": p.objective.detach(), "nats": p.task_nats, **p.extra} for p in partials]
    return [{key: float(value) for key, value in one.items()} for one in told], gradients(model)


@EACH
def test_chunks_change_nothing(name: str) -> None:
    """With and without a teacher, for chunks of few positions and of more than there are."""
    model = lively_model(name, used_vocab=50)
    plain = random_batch(model, rows=3, length=9, ignored=2)
    for batch in (plain, taught(plain, 50)):
        model.loss_chunk = None
        told, expected = trained(model, batch)
        for model.loss_chunk in (5, 1000):
            told_chunked, found = trained(model, batch)
            for ours, theirs in zip(told_chunked, told, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            for key, gradient in found.items():
                assert float((gradient - expected[key]).norm()) <= 1e-5 * float(expected[key].norm()) + 1e-7, key


@EACH
def test_checkpointed_activations_change_no_bit(name: str) -> None:
    """With dropout, exploration, exits, several passes and segments, and gradients that are cut."""
    model = lively_model(name, dropout=0.2)
    batch = random_batch(model, rows=2, length=12, ignored=1)
    for seed in range(2):
        model.checkpoint_activations = False
        told, expected = trained(model, batch, seed)
        state = torch.get_rng_state()
        model.checkpoint_activations = True
        told_again, found = trained(model, batch, seed)
        assert told_again == told
        assert torch.equal(torch.get_rng_state(), state)
        assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@EACH
def test_both_under_autocast(name: str) -> None:
    """bfloat16 products: as close to float32 with both as with neither."""
    model = lively_model(name)
    batch = taught(random_batch(model, rows=2, length=12), 64)
    _, exact = trained(model, batch)
    distances = []
    for chunk, again in ((None, False), (7, True)):
        model.loss_chunk, model.checkpoint_activations = chunk, again
        with torch.autocast("cpu", torch.bfloat16):
            _, found = trained(model, batch)
        apart = torch.stack([(found[key] - exact[key]).norm() for key in exact]).norm()
        distances.append(float(apart / torch.stack([g.norm() for g in exact.values()]).norm()))
    assert distances[1] < 1.25 * distances[0] + 1e-3, distances


@EACH
def test_all_logits_never_exist(name: str) -> None:
    """The vocabulary is like no other number of the model, so that its logits are known by their shape."""
    model = lively_model(name, vocab_size=997).train()
    batch = random_batch(model, rows=2, length=12)

    def most() -> int:
        model.zero_grad()
        with Shapes() as shapes:
            step(model, batch, random.Random(0))
        # Of a matrix (D, V) the last number is that of the vocabulary too.
        logits = [shape for shape in shapes.seen if shape[-1:] == (997,) and shape != (model.config.d_model, 997)]
        return max(math.prod(shape[:-1]) for shape in logits)

    assert most() >= 10
    model.loss_chunk = 5
    assert most() == 5


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_against_float64(chunk: int, teacher: bool) -> None:
    """Value and gradients of chunks beside those written down from the formulas, in float64."""
    generator = torch.Generator().manual_seed(chunk)
    x_ND, weight_VD = (torch.randn(n, 16, generator=generator) for n in (14, 50))
    targets = torch.randint(50, (2, 7), generator=generator)
    targets[0, :3] = targets[1, 6] = IGNORE
    batch = Batch(torch.zeros_like(targets), targets)
    batch = taught(batch, 50) if teacher else batch
    ours = [tensor.clone().requires_grad_() for tensor in (x_ND, weight_VD)]
    objective, sums_K = in_chunks(*ours, chunk, text_loss(batch))
    (objective / 3).backward()

    scored = targets.flatten() != IGNORE
    logits = (x_ND.double() @ weight_VD.double().T)[scored]
    log_q = logits - logits.exp().sum(-1, keepdim=True).log()
    truth = torch.nn.functional.one_hot(targets.flatten()[scored], 50).double()
    nats, share, soft_part = -(log_q * truth).sum(), 1.0, torch.zeros_like(logits)
    if batch.soft is not None:
        share = 0.7
        p, q = ((x / 2).softmax(-1) for x in (batch.soft.logits_BLV.flatten(0, 1).double()[scored], logits))
        distance, soft_part = (p * (p.log() - q.log())).sum(), 0.3 * 2 * (q - p)
        torch.testing.assert_close(sums_K[1].double(), distance, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(objective.double(), 0.7 * nats + 0.3 * 4 * distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums_K[0].double(), nats, rtol=1e-5, atol=1e-5)
    grad_logits = (share * (log_q.exp() - truth) + soft_part) / 3
    grad_x = torch.zeros(14, 16, dtype=torch.float64)
    grad_x[scored] = grad_logits @ weight_VD.double()
    torch.testing.assert_close(ours[0].grad.double(), grad_x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1].grad.double(), grad_logits.T @ x_ND.double()[scored], rtol=1e-4, atol=1e-5)


def test_gradients_of_chunks_are_there_once_and_only_where_asked_for() -> None:
    x_ND, weight_VD = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    batch = random_targets(6, 9)
    objective, _ = in_chunks(x_ND, weight_VD, 4, text_loss(batch))
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        objective.backward()
    with torch.no_grad():
        assert not in_chunks(x_ND, weight_VD, 4, text_loss(batch))[0].requires_grad
    assert not in_chunks(x_ND, weight_VD.detach(), 4, text_loss(batch))[0].requires_grad


def random_targets(n: int, vocabulary: int) -> Batch:
    targets = torch.randint(vocabulary, (1, n))
    return Batch(torch.zeros_like(targets), targets)


@EACH
@pytest.mark.parametrize("chunk", [None, 4, 100])
def test_batches_without_targets_are_harmless(name: str, chunk: int | None) -> None:
    """R10: zero, not zero divided by zero, whoever computes the loss; also with a teacher, and in bfloat16."""
    model = lively_model(name).train()
    model.loss_chunk, model.checkpoint_activations = chunk, chunk == 4
    plain = random_batch(model, rows=2, length=6, ignored=6)
    for batch, precision in ((plain, torch.bfloat16), (taught(plain, 64), torch.float32)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            partials = step(model, batch, random.Random(1))
        told = [(p.objective.detach(), p.task_nats, *p.extra.values()) for p in partials]
        assert [float(value) for values in told for value in values if float(value)] == []
        assert [p.n_targets for p in partials] == [0] * len(partials)
        assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())
