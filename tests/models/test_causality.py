"""Rule 1: nothing at position t depends on a token after t. And: this test sees a leak when there is one (R32)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hrmlm.models import LanguageModel
from tests.families import AFTER_SEGMENTS, FAMILIES
from tests.models.helpers import assert_same, depths, lively_model, observe, random_tokens

LENGTH = 11
TOLERANCE = 1e-6


def check_causal(
    model: LanguageModel,
    tokens_BL: Tensor,
    t: int,
    later_BL: Tensor,
    depth: int | None = None,
    chunks: list[int] | None = None,
) -> None:
    """Replace the tokens after t: logits and statistics up to t do not move. Raises: AssertionError if they do."""
    changed_BL = torch.cat([tokens_BL[:, : t + 1], later_BL[:, t + 1 :]], dim=1)
    before = observe(model, tokens_BL, depth, chunks)
    after = observe(model, changed_BL, depth, chunks)
    assert_same(*({key: value[:, : t + 1] for key, value in seen.items()} for seen in (before, after)), TOLERANCE)


contents = st.lists(st.integers(0, 63), min_size=LENGTH, max_size=LENGTH)
shifts = st.lists(st.integers(1, 63), min_size=LENGTH, max_size=LENGTH)  # every later token does change


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_later_tokens_change_nothing(name: str, mode: str) -> None:
    model = lively_model(name).train(mode == "train")

    @settings(max_examples=2, deadline=None, derandomize=True)
    @given(contents, shifts, st.integers(0, LENGTH - 2))
    def check(tokens: list[int], shift: list[int], t: int) -> None:
        tokens_BL = torch.tensor([tokens])
        later_BL = (tokens_BL + torch.tensor(shift)) % 64
        for depth in depths(model):
            for chunks in (None, [LENGTH], [5, 6]) if mode == "eval" else (None, [5, 6]):
                check_causal(model, tokens_BL, t, later_BL, depth, chunks)

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_of_one_logit_ends_at_its_position(name: str) -> None:
    """The same for all later tokens at once, and exactly: their embeddings get gradient zero."""
    model = lively_model(name)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), embedded.append(out))[0])
    tokens_BL = random_tokens(model, 1, LENGTH)
    for t in (0, 4, LENGTH - 2):
        model(tokens_BL).logits[:, t].square().sum().backward()
        grad_L = embedded[-1].grad.abs().sum(dim=(0, 2))
        assert bool((grad_L[: t + 1] > 0).all()), "every earlier token is seen"
        assert bool((grad_L[t + 1 :] == 0).all())


def _mean_over_positions(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] + inputs[0].mean(dim=1, keepdim=True), *inputs[1:])


def _check_some(model: LanguageModel, chunks: list[int] | None = None) -> None:
    tokens_BL, later_BL = random_tokens(model, 2, LENGTH, seed=3), random_tokens(model, 2, LENGTH, seed=4)
    check_causal(model, tokens_BL, 5, later_BL, chunks=chunks)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mean_over_positions_is_caught_wherever_it_enters(name: str) -> None:
    model = lively_model(name)
    _check_some(model)
    for inner, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.RMSNorm) and inner not in AFTER_SEGMENTS:
            handle = module.register_forward_pre_hook(_mean_over_positions)
            try:
                with pytest.raises(AssertionError, match=r"Mismatched|not close"):
                    _check_some(model)
            except pytest.fail.Exception as error:
                raise AssertionError(f"leak into {inner} stayed unseen") from error
            handle.remove()
    _check_some(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_without_its_mask_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(name)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def blind(*args: Tensor, is_causal: bool = False, **options: object) -> Tensor:
        return attend(*args, is_causal=False, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", blind)
    for chunks in (None, [LENGTH]):
        with pytest.raises(AssertionError, match=r"Mismatched|not close"):
            _check_some(model, chunks)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_leak_into_statistics_alone_is_caught(name: str) -> None:
    """As when a gate or a halting decision reads what the logits do not."""
    model = lively_model(name)
    run = type(model).forward

    def leaky(tokens_BL: Tensor, **options: object) -> object:
        out = run(model, tokens_BL, **options)
        if out.stats:
            out.stats[-1].rms_BL.add_(tokens_BL.float().mean())
        return out

    model.forward = leaky
    with pytest.raises(AssertionError, match="rms_BL"):
        _check_some(model)
