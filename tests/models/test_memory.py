"""A memory that carries over segments: equations, causality, states, rewinding, the cut of the gradient, monitors."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrmlm.data.batch import IGNORE, Batch
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, build_model
from hrmlm.models.cache_policy import parse_cache_policy
from hrmlm.models.memory import MemoryState
from hrmlm.training.recipe import load_recipe, recipe_names
from tests.families import FAMILIES
from tests.models.helpers import build, gradients, lively_model, random_batch, random_tokens, recorded_calls, step
from tests.models.memory_reference import memory_logits
from tests.models.reference import cross_entropy_sum

MEMORY = [name for name in FAMILIES if isinstance(build(name).new_cache(1, 1), MemoryState)]
FIXED = [name for name in MEMORY if not build(name).learns_depth]
each_family = pytest.mark.parametrize("name", MEMORY)
ANY = MEMORY[0]


def reference(model: LanguageModel, row: Tensor, weights: dict[str, Tensor], bptt: int | None = None) -> Tensor:
    c = model.config
    shape = {"heads": c.heads, "kv_heads": c.kv_heads, "memory_heads": c.n_memory_heads, "slots": list(c.slots)}
    return memory_logits(row, weights, **shape, segment=c.segment, iterations=c.iterations, bptt=bptt)


@pytest.mark.parametrize("name", FIXED)
def test_against_the_equations(name: str) -> None:
    """Logits, and all gradients of a training step with its cut after `memory_bptt` segments."""
    model = lively_model(name).double()
    batch = random_batch(model, rows=2, length=23)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(batch.inputs_BL).logits.double()
        expected = torch.stack([reference(model, row, weights) for row in batch.inputs_BL])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    rows = zip(batch.inputs_BL, batch.targets_BL, strict=True)
    loss = sum(cross_entropy_sum(reference(model, r, weights, model.config.memory_bptt), t) for r, t in rows)
    loss.backward()
    partials = step(model.train(), batch)
    assert len(partials) == -(-23 // (model.config.segment * model.config.memory_bptt)) > 1
    total = sum(float(partial.objective.detach()) for partial in partials)
    assert total == pytest.approx(float(loss.detach()), rel=1e-5)
    for key, gradient in gradients(model).items():
        scale = float(weights[key].grad.abs().max())
        torch.testing.assert_close(gradient, weights[key].grad, atol=1e-4 * scale, rtol=1e-4, msg=lambda m, k=key: k)


@each_family
@torch.no_grad()
def test_a_token_changes_nothing_before_it_and_everything_after_its_segment(name: str) -> None:
    model = lively_model(name)
    C = model.config.segment
    tokens_BL = random_tokens(model, 1, 5 * C)
    before = model(tokens_BL).logits
    for j in range(5):
        for place in (j * C, j * C + C - 1):
            changed_BL = tokens_BL.clone()
            changed_BL[0, place] = (changed_BL[0, place] + 1) % 64
            after = model(changed_BL).logits
            assert torch.equal(before[:, :place], after[:, :place])
            moved_L = (before != after).any(dim=-1)[0]
            assert bool(moved_L[(j + 1) * C :].all()), "memory brings it to every later segment"


@each_family
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cutting_gives_the_same_logits_and_the_same_state(name: str, data: Any) -> None:
    """Segment by segment, token by token, or anything else: as one call. The state given is left alone."""
    model = lively_model(name).double()
    length = data.draw(st.integers(1, 24))
    sizes = []
    while sum(sizes) < length:
        sizes.append(data.draw(st.integers(1, length - sum(sizes))))
    tokens_BL = random_tokens(model, 2, length)
    with torch.no_grad():
        whole = model(tokens_BL, state=model.new_state(2))
        state, logits = model.new_state(2), []
        for piece_BL in tokens_BL.split(sizes, dim=1):
            kept = {key: tensor.clone() for key, tensor in state.tensors().items()}
            out = model(piece_BL, state=state)
            assert all(torch.equal(kept[key], tensor) for key, tensor in state.tensors().items())
            state = out.state
            logits.append(out.logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens_BL).logits, atol=1e-5, rtol=0)
    assert state.lengths_B.tolist() == whole.state.lengths_B.tolist() == [length] * 2
    torch.testing.assert_close(state.memory_BSD, whole.state.memory_BSD, atol=1e-9, rtol=0)


@each_family
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_ragged_rows_are_what_they_are_alone(name: str, data: Any) -> None:
    """Rows of any lengths, fed in chunks that end anywhere, whose segments end at different times."""
    model = lively_model(name).double()
    rows = data.draw(st.integers(2, 3))
    tokens_BL = random_tokens(model, rows, 30)
    cache, fed_B = model.new_cache(rows, 0), torch.zeros(rows, dtype=torch.long)
    for _ in range(3):
        new_B = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
        chunk_BL = torch.zeros(rows, max(1, int(new_B.max())), dtype=torch.long)
        for row in range(rows):
            chunk_BL[row, : new_B[row]] = tokens_BL[row, fed_B[row] : fed_B[row] + new_B[row]]
        with torch.no_grad():
            logits = model(chunk_BL, cache=cache, lengths_B=new_B).logits
            for row in range(rows):
                end = int(fed_B[row] + new_B[row])
                if new_B[row]:
                    alone = model(tokens_BL[row : row + 1, :end]).logits[0, fed_B[row] :]
                    torch.testing.assert_close(logits[row, : new_B[row]], alone, atol=1e-5, rtol=0)
        fed_B += new_B
        assert torch.equal(cache.lengths_B, fed_B)


@each_family
@torch.no_grad()
def test_rewinding(name: str) -> None:
    """By any number of tokens down to the beginning of the last complete segment; further is refused."""
    model = lively_model(name).double()
    C = model.config.segment
    tokens_BL, other_BL = random_tokens(model, 2, 3 * C), random_tokens(model, 2, 2 * C, seed=5)
    for length in (2 * C, 2 * C + 1, 3 * C - 1):
        for back in range(0, length - (length // C - 1) * C + 1):
            cache = model.new_cache(2, 0)
            model(tokens_BL[:, :length], cache=cache)
            cache.crop(torch.tensor([length - back, length]))
            continued = model(other_BL, cache=cache).logits
            for row, kept in enumerate((length - back, length)):
                full_L = torch.cat([tokens_BL[row, :kept], other_BL[row]])
                expected = model(full_L[None]).logits[0, kept:]
                torch.testing.assert_close(continued[row], expected, atol=1e-5, rtol=0)
    cache = model.new_cache(2, 0)
    model(tokens_BL[:, : 2 * C + 1], cache=cache)
    with pytest.raises(UserError, match=f"row 0 cannot go back from {2 * C + 1} to {C - 1} tokens"):
        cache.crop(C - 1)
    assert cache.lengths_B.tolist() == [2 * C + 1] * 2


@each_family
@torch.no_grad()
def test_the_state_does_not_grow_and_there_is_no_limit(name: str) -> None:
    model = lively_model(name)
    cache = model.new_cache(1, 4)
    size = cache.bytes
    for _ in range(3):
        model(random_tokens(model, 1, 100), cache=cache)
        assert cache.bytes == size
    assert cache.lengths_B.tolist() == [300]
    assert model.config.context < 300


@each_family
def test_the_gradient_is_cut_between_groups_of_segments_and_only_there(name: str) -> None:
    model = lively_model(name).train()
    C, group = model.config.segment, model.config.memory_bptt
    tokens_BL = random_tokens(model, 1, 2 * group * C)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), embedded.append(out))[0])
    targets_BL = torch.full_like(tokens_BL, IGNORE)
    targets_BL[0, [group * C - 1, 2 * group * C - 1]] = 5  # the last position of either group
    for partial in model.losses(Batch(tokens_BL, targets_BL)):
        partial.objective.backward()
    assert len(embedded) == 2
    for part in embedded:
        reached_S = part.grad.abs().sum(dim=-1)[0].view(group, C).sum(dim=1) > 0
        assert bool(reached_S.all()), "every segment of its own group"
    first = embedded[0].grad.clone()
    model.zero_grad()
    targets_BL[0, 2 * group * C - 1] = IGNORE
    embedded.clear()
    for partial in model.losses(Batch(tokens_BL, targets_BL)):
        partial.objective.backward()
    assert torch.equal(embedded[0].grad, first), "the second group's loss never reached the first group"
    assert not bool(embedded[1].grad.any())


@pytest.mark.parametrize("bptt", [2, 3])
def test_a_forward_pass_in_training_mode_is_cut_too(bptt: int) -> None:
    model = lively_model(ANY, memory_bptt=bptt)
    C = model.config.segment
    tokens_BL = random_tokens(model, 1, 4 * C)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), embedded.append(out))[0])
    for training, first in ((True, 2 if bptt == 2 else 3), (False, 0)):
        model.train(training)(tokens_BL).logits[0, -1].square().sum().backward()
        reached_S = embedded[-1].grad.abs().sum(dim=-1)[0].view(4, C).sum(dim=1) > 0
        assert reached_S.tolist() == [segment >= first for segment in range(4)]


def test_an_earlier_iteration_has_a_loss_of_its_own() -> None:
    """Of a text of one segment it is that of a model of fewer iterations."""
    model = lively_model(ANY, iterations=4, auxiliary_weight=0.3).train()
    batch = random_batch(model, length=model.config.segment)
    seen = set()
    for seed in range(12):
        (partial,) = model.losses(batch, random.Random(seed))
        assert float(partial.objective.detach()) == pytest.approx(
            float(partial.task_nats) + 0.3 * float(partial.extra["auxiliary"]), rel=1e-5
        )
        (full,) = model.losses(batch)
        assert float(full.task_nats) == float(partial.task_nats)
        nats = {}
        for depth in (1, 2, 3):
            with torch.no_grad():
                logits = model.eval()(batch.inputs_BL, depth=depth).logits
            model.train()
            nats[depth] = float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="sum")
            )
        seen |= {depth for depth, n in nats.items() if float(partial.extra["auxiliary"]) == pytest.approx(n, rel=1e-5)}
    assert seen == {1, 2, 3}
    (none,) = lively_model(ANY, auxiliary_weight=0.0).train().losses(batch, random.Random(0))
    assert none.extra == {}


def test_the_curriculum_grows_evenly() -> None:
    model = lively_model(ANY, iterations=8, curriculum_start=4, curriculum_fraction=0.5)
    depths = [model._iterations_at(progress / 100) for progress in range(101)]
    assert depths[0] == 4
    assert depths == sorted(depths)
    assert {depth: depths.count(depth) for depth in (4, 5, 6, 7)} == dict.fromkeys((4, 5, 6, 7), 10)
    assert set(depths[50:]) == {8}
    batch = random_batch(model)
    for progress, depth in ((0.0, 4), (0.25, 6), (1.0, 8)):
        with recorded_calls(model) as calls:
            partials = list(model.train().losses(batch, progress=progress))
        assert {partial.depth for partial in partials} == {depth}
        assert len(calls["unit"]) == 2 * depth, "two segments"
    assert next(iter(lively_model(ANY).train().losses(batch, progress=0.0))).depth == 3, "none by default"


def test_what_is_written_is_dropped_in_training_only() -> None:
    model = lively_model(ANY, write_dropout=0.5)
    tokens_BL = random_tokens(model, 2, 12)
    C = model.config.segment
    with torch.no_grad():
        first, second = model(tokens_BL).logits, model(tokens_BL).logits
        assert torch.equal(first, second)
        model.train()
        first, second = model(tokens_BL).logits, model(tokens_BL).logits
    assert torch.equal(first[:, :C], second[:, :C])
    assert not torch.equal(first[:, C:], second[:, C:])


@pytest.mark.parametrize("kind", ["film", "lora"])
def test_conditioning_tells_iterations_apart_and_knows_the_trained_ones_only(kind: str) -> None:
    model = lively_model(ANY, step_conditioning=kind)
    with pytest.raises(UserError, match="4 is not possible: step_conditioning is learned for 3 iterations"):
        model.schedule(4)
    tokens_BL = random_tokens(model, 1, 6)
    with torch.no_grad():
        before = model(tokens_BL, depth=2).logits, model(tokens_BL).logits
        weight = model.unit.film if kind == "film" else model.unit.up
        weight[:, 2] += 1
        after = model(tokens_BL, depth=2).logits, model(tokens_BL).logits
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("d_model", [64, 128, 256, 512, 1024])
def test_the_memory_is_small(d_model: int) -> None:
    """At most 15 % of the parameters, at the defaults and a vocabulary of 4,096."""
    with torch.device("meta"):
        model = build_model({"family": build(ANY).config.family, "vocab_size": 4096, "d_model": d_model})
    assert model.memory_parameters <= 0.15 * sum(parameter.numel() for parameter in model.parameters())
    D, W, S, heads = d_model, d_model // 4, 28, model.config.heads
    own = S * D + 3 * D + 3 * D + (D * W) * 7 + (D + W) * D + D * W + 3 * heads
    assert model.memory_parameters == own


def test_the_memories_of_the_recipes_are_small() -> None:
    shares = []
    for name in recipe_names():
        with torch.device("meta"):
            model = build_model({"vocab_size": 4096, **load_recipe(name).model})
        if hasattr(model, "memory_parameters"):
            shares.append(model.memory_parameters / sum(parameter.numel() for parameter in model.parameters()))
    assert len(shares) >= 2
    assert max(shares) <= 0.15


def test_gates_start_nearly_closed_and_coarse_ones_most() -> None:
    family = build(ANY).config.family
    for settings_, biases in (
        ({}, (-4, -3, -2)),
        ({"slots": [3]}, (-3,)),
        ({"slots": [1, 2, 3, 4, 5]}, (-4, -3.5, -3, -2.5, -2)),
        ({"slots": [2, 2], "gate_bias": [-1.5, 0.5]}, (-1.5, 0.5)),
    ):
        model = build_model({"family": family, "vocab_size": 64, "d_model": 32, "n_heads": 2, **settings_})
        assert model.config.gate_biases == biases
        assert [set(bias.tolist()) for bias in model.memory.gate_biases] == [{bias} for bias in biases]


# Monitors


def test_monitors_tell_sizes_gates_and_gradients() -> None:
    model = lively_model(ANY).train()
    C = model.config.segment
    batch = random_batch(model, length=2 * C)
    assert model.monitors() == {}
    with recorded_calls(model) as calls:
        step(model, batch)
    seen = model.monitors()
    assert model.monitors() == {}, "since the last call"
    for iteration in (1, 2, 3):
        states = calls["unit"][iteration - 1 :: 3]
        norm = torch.stack([state.grad.square().sum() for state in states]).sum().sqrt()
        assert seen["iteration_gradient_norm"][str(iteration)] == pytest.approx(float(norm), rel=1e-5)
    with torch.no_grad():
        state = model.eval()(batch.inputs_BL[:, : C + 1], state=model.new_state(2)).state
        rms = [float(level.square().mean().sqrt()) for level in state.memory_BSD.split([2, 3], dim=1)]
    assert list(seen["memory_rms"].values()) == pytest.approx(rms, rel=1e-5)
    with torch.no_grad():
        for bias, value in zip(model.memory.gate_biases, (-20.0, 20.0), strict=True):
            bias.fill_(value)
    step(model.train(), batch)
    gates = model.monitors()["memory_gate"]
    assert gates["1"] < 0.01
    assert gates["2"] > 0.99


def test_complaints() -> None:
    model = build(ANY)
    fine = {"memory_gate": {"1": 0.02, "2": 0.3}, "memory_rms": {"1": 0.5, "2": 0.5}}
    assert model.complaints(fine, fine) == {}
    assert model.complaints({}, {}) == {}
    for gate, words in ((0.0001, "stands still"), (0.99, "forgets everything")):
        found = model.complaints({**fine, "memory_gate": {"1": 0.02, "2": gate}}, fine)
        assert list(found) == ["memory_gate/2"]
        assert words in found["memory_gate/2"]
    for rms in (0.04, 6.0):
        found = model.complaints({**fine, "memory_rms": {"1": rms, "2": 0.5}}, fine)
        assert list(found) == ["memory_rms/1"]
        assert "drifts" in found["memory_rms/1"]


# Mistakes


def test_states_of_others_are_refused() -> None:
    model, other = build(ANY), build("transformer")
    with pytest.raises(UserError, match="no state of constant size; use cache="):
        other.new_state(1)
    with pytest.raises(UserError, match="no state of constant size"):
        other(random_tokens(other, 1, 3), state=model.new_state(1))
    with pytest.raises(UserError, match="not one of this model"):
        model(random_tokens(model, 1, 3), state=other.new_cache(1, 4))
    with pytest.raises(UserError, match="not one of this model"):
        model(random_tokens(model, 1, 3), state=build(ANY, segment=6).new_state(1))
    with pytest.raises(UserError, match="holds 2 rows and 1 rows"):
        model(random_tokens(model, 1, 3), state=model.new_state(2))
    with pytest.raises(UserError, match="exclude each other"):
        model(random_tokens(model, 1, 3), state=model.new_state(1), cache=model.new_cache(1, 4))


def test_exit_rules_and_cache_policies_are_refused() -> None:
    model = build(ANY)
    with pytest.raises(UserError, match="segment by segment; give a depth"):
        model.check_exit()
    with pytest.raises(UserError, match="cache policy first saves nothing here"):
        model.new_cache(1, 4, policy=parse_cache_policy("first"))


def test_windows_of_one_segment_are_not_trained() -> None:
    model = build(ANY)
    model.check_training()
    model.check_training(model.config.segment + 1)
    with pytest.raises(UserError, match="windows of 5 tokens hold one segment of 5: nothing would ever be read"):
        model.check_training(model.config.segment)


# Use


def test_it_learns_to_recall_what_an_earlier_segment_said() -> None:
    """A key stands in the first segment, the question in the second or third; without a memory this is chance."""
    torch.manual_seed(0)
    shape = {"vocab_size": 24, "d_model": 32, "n_heads": 2, "segment": 6, "iterations": 2, "slots": [2, 4]}
    model = build_model({"family": build(ANY).config.family, **shape, "memory_bptt": 3}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)

    def batch(segments: int) -> Batch:
        tokens_BL = torch.randint(10, 24, (32, 6 * segments + 1), generator=generator)
        key_B = torch.randint(0, 8, (32,), generator=generator)
        tokens_BL[:, 2], tokens_BL[:, 3], tokens_BL[:, -2], tokens_BL[:, -1] = 8, key_B, 9, key_B
        targets_BL = torch.full_like(tokens_BL[:, 1:], IGNORE)
        targets_BL[:, -1] = key_B
        return Batch(tokens_BL[:, :-1].contiguous(), targets_BL)

    for number in range(300):
        optimizer.zero_grad()
        for partial in model.losses(batch(2 + number % 2)):
            (partial.objective / 32).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for segments in (2, 3):
        test = batch(segments)
        with torch.no_grad():
            right_B = model.eval()(test.inputs_BL).logits[:, -1].argmax(-1) == test.targets_BL[:, -1]
        assert float(right_B.double().mean()) > 0.5
