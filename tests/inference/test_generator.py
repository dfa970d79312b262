"""Packed weights, compiled steps, precisions, and the generator that holds them."""

import copy

import pytest
import torch

import hrmlm
from hrmlm.errors import UserError
from hrmlm.inference import GenerationOptions, Generator, generate
from hrmlm.inference.packing import can_pack, packed, packed_bytes
from hrmlm.models.blocks import Linear
from tests.inference.helpers import BYTES, each_family, greedy, small_model

needs_packing = pytest.mark.skipif(not can_pack(small_model("transformer")), reason="this build of torch cannot pack")


@needs_packing
@each_family
def test_packed_weights_give_the_same_numbers(family: str) -> None:
    """Against float64, within what float32 itself is off; for one row, a few and many."""
    model = small_model(family)
    exact = small_model(family).double()
    for shape in ((1, 1), (3, 2), (2, 40)):
        tokens_BL = torch.randint(200, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            plain = model(tokens_BL).logits
            with packed(model):
                assert all(m.packed is not None for m in model.modules() if isinstance(m, Linear))
                fast = model(tokens_BL).logits
            true = exact(tokens_BL).logits
        scale = float(true.abs().max())
        assert float((fast - true).abs().max()) < 2 * float((plain - true).abs().max()) + 2e-5 * scale
    assert not any(m.packed is not None for m in model.modules() if isinstance(m, Linear))


@needs_packing
@each_family
def test_training_never_reads_packed_weights(family: str) -> None:
    model = small_model(family)
    tokens_BL = torch.randint(200, (1, 12))
    with packed(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        model(tokens_BL).logits.sum().backward()
        with_grad = model(tokens_BL).logits.detach()
    with torch.no_grad():
        torch.testing.assert_close(with_grad, model(tokens_BL).logits, atol=1e-5, rtol=1e-5)
    assert all(m.weight.grad is not None for m in model.modules() if isinstance(m, Linear))


@needs_packing
def test_packing_twice_and_mistakes_leave_the_model_as_it_was() -> None:
    model = small_model("hrm_lm")
    before = set(model.state_dict())
    with packed(model), packed(model):
        assert model.packed_head is not None
    assert model.packed_head is None
    with pytest.raises(RuntimeError, match="inside"), packed(model):
        raise RuntimeError("inside")
    assert model.packed_head is None
    with packed(model):
        assert set(model.state_dict()) == before, "copies are never saved"
        assert packed_bytes(model) <= sum(p.nbytes for p in model.parameters())
    double = small_model("hrm_lm").double()
    with packed(double):
        assert double.packed_head is None, "float64 cannot be packed and runs as it is"


@needs_packing
@each_family
def test_autocast_reads_plain_weights(family: str) -> None:
    """oneDNN's packed product takes the precision it was packed for; autocast asks for another one."""
    model = small_model(family)
    with torch.autocast("cpu", dtype=torch.bfloat16), Generator(model, BYTES) as generator:
        assert len(generator.generate(["abc"], greedy(4))[0].ids) == 4


@needs_packing
def test_weights_that_changed_are_packed_anew() -> None:
    """Also where an abandoned stream still holds the model packed; and a copy of a packed model is not packed."""
    model = small_model("universal")
    stream = Generator(model, BYTES).stream("abc", greedy(20))
    with packed(model):
        next(stream)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        while_packed = generate(model, BYTES, ["abc"], greedy(12))[0].ids
        copied = copy.deepcopy(model)
        assert copied.packed_head is None
        assert copied.block.mlp.down.packed is None
    assert generate(model, BYTES, ["abc"], greedy(12))[0].ids == while_packed
    assert generate(copied, BYTES, ["abc"], greedy(12))[0].ids == while_packed


@each_family
def test_an_interrupted_generation_does_not_go_on_with_another_text(
    family: str,
) -> None:
    model = small_model(family)
    engine = Generator(model, BYTES).engine(["abc"], greedy(8))
    engine.step()
    readout = model.readout

    def interrupt(*args: object) -> torch.Tensor:
        raise KeyboardInterrupt

    model.readout = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    model.readout = readout
    with pytest.raises(UserError, match="interrupted"):
        engine.step()


def test_impossible_options_are_refused_without_tokens_too() -> None:
    model = small_model("universal")
    for options in ({"draft": 99}, {"draft": 1, "cache": False}):
        with pytest.raises(UserError):
            generate(model, BYTES, "x", greedy(0, **options))
    with pytest.raises(UserError, match="first"):
        generate(small_model("transformer"), BYTES, "x", greedy(0, cache_policy="first"))
    for wrong in (0, -1, True, "AUTO", "", 1.5):
        with pytest.raises(UserError, match="number of cycles from 1 on"):
            GenerationOptions.parse({"draft": wrong}, "generate")
    with pytest.raises(UserError, match="-1"):
        model.new_cache(1, 4).crop(-1)


@each_family
def test_a_generator_says_what_the_functions_say(family: str) -> None:
    model = small_model(family)
    whole = generate(model, BYTES, ["hello", "x"], greedy(9))
    with Generator(model, BYTES) as generator:
        again = generator.generate(["hello", "x"], temperature=0, max_new_tokens=9)
        streamed = list(generator.stream("hello", greedy(9)))
        first, second = generator.stream("hello", greedy(9)), generator.stream("x", greedy(9))
        mixed = [(next(first).id, next(second).id) for _ in range(9)]
    assert [row.ids for row in whole] == [row.ids for row in again]
    assert [event.id for event in streamed] == whole[0].ids
    assert [a for a, _ in mixed] == whole[0].ids, "two streams at once do not disturb each other"
    assert [b for _, b in mixed] == whole[1].ids
    assert generator.generate("hello", greedy(9))[0].ids == whole[0].ids, "closed, it still works"


def test_a_result_tells_everything_about_each_token() -> None:
    row = generate(small_model("hrm_lm"), BYTES, "hello", greedy(12, draft=1, draft_tokens=2))[0]
    assert len(row.ids) == len(row.logprobs) == len(row.steps) == len(row.drafted) == len(row.texts) == 12
    assert "".join(row.texts) == row.text
    assert row.steps == [2] * 12
    assert any(row.drafted)


@each_family
def test_bfloat16(family: str) -> None:
    """Runs, cached and packed, as near to float64 as 8 bits allow."""
    model = small_model(family)
    tokens_BL = torch.randint(200, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        true = small_model(family).double()(tokens_BL, depth=1).logits
    with Generator(model, BYTES, dtype=torch.bfloat16) as generator:
        half = generator.model
        assert half is not model
        assert model.embedding.weight.dtype == torch.float32
        with torch.no_grad():
            whole = half(tokens_BL, depth=1).logits
            cache = half.new_cache(1, 12, depth=1)
            parts = [half(tokens_BL[:, i : i + 3], cache=cache, depth=1).logits for i in range(0, 12, 3)]
        bound = 0.25 * float(true.std())
        assert cache.keys[0].dtype == torch.bfloat16
        assert float((whole - true).square().mean().sqrt()) < bound
        assert float((torch.cat(parts, dim=1) - true).square().mean().sqrt()) < bound
        assert len(generator.generate("x", greedy(5))[0].ids) == 5
    with pytest.raises(UserError, match="float16"):
        Generator(model, BYTES, dtype=torch.float16)


def test_bfloat16_is_not_packed_where_the_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = small_model("transformer").to(torch.bfloat16)
    assert not can_pack(model)
    assert packed_bytes(model) == 0
    with packed(model):
        assert model.packed_head is None


def test_compiled_steps_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the eager backend: what is traced, not what a compiler makes of it (see benchmarks/decode_latency.py)."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend="eager", fullgraph=True))
    model = small_model("hrm_lm")
    plain = generate(model, BYTES, ["hello", "x"], greedy(6))
    with Generator(model, BYTES, compile=True) as generator:
        for draft in ({}, {"draft": 1, "draft_tokens": 2}):
            assert [row.ids for row in generator.generate(["hello", "x"], greedy(6, **draft))] == [r.ids for r in plain]


def test_compiling_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="token by token"):
        Generator(small_model("cosmicfish"), BYTES, compile=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="C\\+\\+ compiler"):
        Generator(small_model("hrm_lm"), BYTES, compile=True)


def test_options_or_settings() -> None:
    generator = Generator(small_model("hrm_lm"), BYTES)
    with pytest.raises(UserError, match="not both"):
        generator.generate("x", GenerationOptions(), seed=1)
    with pytest.raises(UserError, match="max_new_token"):
        generator.generate("x", max_new_token=1)
    assert hrmlm.Generator is Generator
    with pytest.raises(AttributeError, match="nothing"):
        hrmlm.nothing  # noqa: B018
