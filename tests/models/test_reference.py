"""The models against the same equations written independently, and against transformers' Llama."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hrmlm.models import LanguageModel
from tests.models.helpers import FixedExit, gradients, lively_model, random_batch, step
from tests.models.reference import cross_entropy_sum, stacked_logits, two_speed_logits


def _weights(model: LanguageModel) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {
        name: tensor.detach().double().clone().requires_grad_(name in parameters)
        for name, tensor in model.state_dict().items()
    }


def _compare(model: LanguageModel, reference: Any, rng: Any = None) -> None:
    """Logits in evaluation mode (full depth), loss and all gradients of a training step."""
    model.double()
    batch = random_batch(model, rows=2, length=9)
    weights = _weights(model)
    with torch.no_grad():
        logits = model(batch.inputs_BL).logits
    if rng is None:
        expected = torch.stack([reference(row, weights) for row in batch.inputs_BL])
        torch.testing.assert_close(logits.double(), expected, atol=2e-6, rtol=1e-6)
    rows = zip(batch.inputs_BL, batch.targets_BL, strict=True)
    loss = sum(cross_entropy_sum(reference(row, weights), targets) for row, targets in rows)
    loss.backward()
    (partial,) = step(model.train(), batch, rng)
    torch.testing.assert_close(partial.objective.double(), loss, atol=0, rtol=1e-6)
    for name, gradient in gradients(model).items():
        expected = weights[name].grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(
            gradient, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("n", "t", "k"),
    [(2, 2, None), (2, 2, 4), (2, 2, 3), (2, 2, 2), (2, 2, 1), (3, 1, 2), (2, 3, 4), (1, 3, 2), (4, 1, 1)],
)
def test_two_speed_recurrence_and_its_window(n: int, t: int, k: int | None) -> None:
    model = lively_model("hrm_lm", n_cycles=n, fast_steps=t, gradient_window=k)
    _compare(model, lambda row, w: two_speed_logits(row, w, 2, n, t, k))


@pytest.mark.parametrize("gate", ["gru", "update_only", "none"])
@pytest.mark.parametrize("readout", ["sum", "slow", "fast"])
def test_gates_and_readouts(gate: str, readout: str) -> None:
    model = lively_model("hrm_lm", gate=gate, readout=readout)
    _compare(model, lambda row, w: two_speed_logits(row, w, 2, 2, 2, gate=gate, readout=readout))


def test_an_earlier_exit_has_its_own_window() -> None:
    """Ended after 2 of 3 cycles, the window still covers the last K steps that were run."""
    model = lively_model("hrm_lm", n_cycles=3, fast_steps=2, gradient_window=3, exit_probability=0.5)
    _compare(model, lambda row, w: two_speed_logits(row, w, 2, 2, 2, 3), FixedExit(2))


@pytest.mark.parametrize("name", ["transformer", "transformer-gqa"])
def test_stacked_blocks(name: str) -> None:
    model = lively_model(name)
    heads, kv_heads = model.config.heads, model.config.kv_heads
    places = ["blocks.0.", "blocks.1."]
    _compare(model, lambda row, w: stacked_logits(row, w, heads, kv_heads, places, lambda h, e, i: h))


@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_one_block_repeated(inject: bool, learned: bool, window: int | None) -> None:
    options = {"input_injection": inject, "step_embedding": "learned" if learned else "none"}
    model = lively_model("universal", gradient_window=window, **options)

    def reference(row: Tensor, w: dict[str, Tensor]) -> Tensor:
        def before(h: Tensor, embedded: Tensor, index: int) -> Tensor:
            h = h.detach() if window == 1 and index == 3 else h
            h = h + embedded if inject else h
            return h + w["steps.weight"][index] if learned else h

        return stacked_logits(row, w, 2, 2, ["block."] * 4, before)

    _compare(model, reference)


def _as_llama(model: LanguageModel) -> Any:
    transformers = pytest.importorskip("transformers")
    config = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=4 * config.d_model,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
        )
    )
    theirs = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    theirs["lm_head.weight"] = model.embedding.weight
    for i, block in enumerate(model.blocks):
        at, size = f"model.layers.{i}.", block.attention.head_dim
        parts = block.attention.qkv.weight.split([size * config.heads, size * config.kv_heads, size * config.kv_heads])
        theirs |= {f"{at}self_attn.{n}_proj.weight": part for n, part in zip("qkv", parts, strict=True)}
        gate, up = block.mlp.gate_up.weight.chunk(2)
        theirs |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        theirs |= {f"{at}self_attn.o_proj.weight": block.attention.out.weight}
        theirs |= {f"{at}mlp.down_proj.weight": block.mlp.down.weight}
        theirs |= {f"{at}input_layernorm.weight": block.norm_attention.weight}
        theirs |= {f"{at}post_attention_layernorm.weight": block.norm_mlp.weight}
    llama.load_state_dict({name: tensor.detach().clone() for name, tensor in theirs.items()})
    return llama.eval()


@pytest.mark.parametrize("name", ["transformer", "transformer-gqa"])
@torch.no_grad()
def test_the_baseline_is_a_llama(name: str) -> None:
    model = lively_model(name)
    tokens_BL = random_batch(model, length=40).inputs_BL
    torch.testing.assert_close(model(tokens_BL).logits, _as_llama(model)(tokens_BL).logits, atol=1e-5, rtol=1e-5)
