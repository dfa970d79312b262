"""Released CosmicFish weights: the numbers of the published implementation, and refusals that name what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hrmlm
from hrmlm.checkpoint import named_tensors, open_checkpoint
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.importing import formats, import_weights
from hrmlm.importing.cosmicfish import settings, sources
from hrmlm.models import LanguageModel, build_model, model_config
from tests.importing import published

CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "n_embd": 16,
    "block_size": 24,
    "n_input_layers": 2,
    "n_output_layers": 1,
    "n_head": 4,
    "n_kv_head": 2,
    "hrm_H_layers": 2,
    "hrm_L_layers": 1,
    "hrm_H_cycles": 2,
    "hrm_L_cycles": 1,
    "hrm_max_steps": 5,
    "hrm_exploration_prob": 0.1,
    "dropout": 0.1,
    "bias": False,
    "use_rotary": True,
    "use_gqa": True,
    "use_swiglu": True,
    "eps": 1e-5,
    "forward_dtype": "bfloat16",
}


def synthetic(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the published names."""
    generator = torch.Generator().manual_seed(seed)
    model = model_config(settings(config, "config"))
    shapes = {name: shape for source in sources(model).values() for name, shape in source.parts.items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if ".ln" in f".{name}" else noise * (shape[-1] ** -0.5 if shape[1:] else 0.5)
    weights["hrm_core.q_head.bias"] = torch.tensor([-0.2, 0.2])  # about as often on one side as on the other
    return weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[Path, Path]:
    files = folder / "model.safetensors", folder / "config.json"
    save_file(weights, files[0])
    files[1].write_text(json.dumps(config))
    return files


def imported(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], **options: Any) -> LanguageModel:
    import_weights("cosmicfish", *write(folder, config, weights), folder / "out", **options)
    return hrmlm.load(folder / "out")


@pytest.mark.parametrize("name", ["gqa-small", "mha-oneblock"])
@torch.no_grad()
def test_released_implementation(name: str, shared: Path, tmp_path: Path) -> None:
    folder = shared / "fixtures" / "cosmicfish"
    described = json.loads((folder / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described["config"]))
    expected = load_file(folder / f"{name}.expected.safetensors")
    import_weights("cosmicfish", folder / f"{name}.weights.safetensors", tmp_path / "config.json", tmp_path / "out")
    model = hrmlm.load(tmp_path / "out")
    assert model.config.halting == "sequence"
    for k, case in enumerate(described["cases"]):
        out = model(expected[f"ids.{k}"])
        torch.testing.assert_close(out.logits, expected[f"logits.{k}"], atol=1e-4, rtol=0)
        torch.testing.assert_close(out.halting_logits_B2, expected[f"q.{k}"], atol=1e-4, rtol=0)
        assert out.steps_BL.tolist() == [[case["steps_taken"]] * case["length"]]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_rotary": False},
    {"use_swiglu": False},
    {"use_gqa": False},
    {"use_rotary": False, "use_swiglu": False, "use_gqa": False},
    {"hrm_max_steps": 1},
    {"eps": 1e-2},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.no_grad()
def test_every_option_against_the_published_equations(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, **changes}
    counted = set()
    for seed in range(3):
        weights = synthetic(config, seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        model = imported(folder, config, weights)
        exact = {name: tensor.double() for name, tensor in weights.items()}
        for length in (1, 7, 24):
            ids_L = torch.randint(40, (length,), generator=torch.Generator().manual_seed(length))
            logits_LV, q, steps = published.forward(ids_L, exact, config)
            out = model(ids_L[None])
            torch.testing.assert_close(out.logits[0].double(), logits_LV, atol=1e-4, rtol=0)
            torch.testing.assert_close(out.halting_logits_B2[0].double(), q, atol=1e-4, rtol=0)
            assert out.steps_BL.unique().tolist() == [steps]
            counted.add(steps)
    assert len(counted) > 1 or config["hrm_max_steps"] == 1, "the cases stop at different steps"


def test_both_traps_matter(tmp_path: Path) -> None:
    """Swapped gates or unpermuted queries are far outside the tolerance: the comparison above sees them."""
    config = {**CONFIG, "hrm_max_steps": 1}
    weights = synthetic(config)
    model = imported(tmp_path, config, weights)
    ids_BL = torch.arange(12)[None]
    with torch.no_grad():
        right = model(ids_BL).logits
        attention = model.input_blocks[0].attention.qkv.weight
        rows = attention[:4].clone()
        attention[:4] = rows[[0, 2, 1, 3]]
        assert float((model(ids_BL).logits - right).abs().max()) > 1e-2
        attention[:4] = rows
        gate_up = model.input_blocks[0].mlp.gate_up.weight
        gate_up.copy_(gate_up.roll(64, dims=0))
        assert float((model(ids_BL).logits - right).abs().max()) > 1e-2


def test_every_tensor_of_ours_is_covered() -> None:
    """Of every variant, and the published size."""
    for changes in [*VARIANTS, {"vocab_size": 50304, "n_embd": 448, "n_head": 8, "n_kv_head": 4}]:
        config = model_config(settings({**CONFIG, **changes}, "config"))
        with torch.device("meta"):
            model = build_model(config)
        made = {name: source.parts.values() for name, source in sources(config).items()}
        assert made.keys() == named_tensors(model).keys()
        for name, tensor in named_tensors(model).items():
            assert sum(torch.Size(shape).numel() for shape in made[name]) == tensor.numel(), name


def test_head_may_be_stored_too_but_must_be_tied(tmp_path: Path) -> None:
    weights = synthetic(CONFIG)
    imported(tmp_path, CONFIG, {**weights, "lm_head.weight": weights["wte.weight"].clone()})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match=r"lm_head\.weight differs from wte\.weight"):
        imported(other, CONFIG, {**weights, "lm_head.weight": weights["wte.weight"] + 1})
    assert not (other / "out").exists()


def test_all_that_does_not_fit_is_named_in_one_line(tmp_path: Path) -> None:
    weights = synthetic(CONFIG)
    del weights["ln_f.weight"], weights["hrm_core.H_level.layers.1.attn.v_proj.weight"]
    weights["extra.weight"] = torch.zeros(1)
    weights["input_blocks.0.mlp.up.weight"] = torch.zeros(3, 16)
    with pytest.raises(UserError) as caught:
        imported(tmp_path, CONFIG, weights)
    text = str(caught.value)
    for part in (
        "missing ln_f.weight",
        "missing hrm_core.H_level.layers.1.attn.v_proj.weight",
        "unknown extra.weight",
        "input_blocks.0.mlp.up.weight has shape (3, 16) where (64, 16) is needed",
    ):
        assert part in text
    assert "\n" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": True}, "bias: true"),
        ({"n_embd": None, "hrm_H_cycles": None}, "missing hrm_H_cycles; missing n_embd"),
        ({"n_kv_head": None}, "missing n_kv_head"),
        ({"use_rope": True}, "unknown use_rope, did you mean 'use_rotary'"),
        ({"use_gqa": 1}, "use_gqa must be true or false, not 1"),
        ({"n_head": 3}, "d_model 16 must be n_heads"),
        ({"hrm_max_steps": 0}, "max_steps"),
    ],
)
def test_configurations_that_cannot_be_expressed(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG, synthetic(CONFIG))
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    files[1].write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        import_weights("cosmicfish", *files, tmp_path / "out")
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_optional_keys_may_be_absent(tmp_path: Path) -> None:
    config = {**CONFIG, "use_gqa": False}
    weights = synthetic(config)
    for key in ("bias", "dropout", "n_kv_head", "forward_dtype", "hrm_exploration_prob"):
        del config[key]
    assert imported(tmp_path, config, weights).config.dropout == 0


def test_pickles_and_broken_files_are_refused(tmp_path: Path) -> None:
    weights, config = write(tmp_path, CONFIG, synthetic(CONFIG))

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save(Trap(), tmp_path / "model.pt")
    for name in ("model.pt", "pytorch_model.bin"):
        with pytest.raises(UserError, match=r"\.safetensors.*pickles"):
            import_weights("cosmicfish", tmp_path / name, config, tmp_path / "out")
    (tmp_path / "model.pt").rename(tmp_path / "lie.safetensors")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        import_weights("cosmicfish", tmp_path / "lie.safetensors", config, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="does not exist"):
        import_weights("cosmicfish", weights, tmp_path / "no.json", tmp_path / "out")
    with pytest.raises(UserError, match="unknown format 'cosmicfih', did you mean 'cosmicfish'"):
        import_weights("cosmicfih", weights, config, tmp_path / "out")
    assert formats() == ["cosmicfish"]


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = synthetic(CONFIG)
    weights["hrm_core.L_init"][3] = torch.nan
    weights["wte.weight"][0, 0] = torch.inf
    with pytest.raises(UserError, match=r"hrm_core\.L_init is not finite; wte\.weight is not finite"):
        imported(tmp_path, CONFIG, weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Quantised weights without their scales would load as noise."""
    weights = {name: tensor.to(dtype) for name, tensor in synthetic(CONFIG).items()}
    with pytest.raises(UserError, match=r"wte\.weight holds \w+ where floating point is needed"):
        imported(tmp_path, CONFIG, weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["n_head", "n_kv_head", "vocab_size", "eps"])
def test_null_is_not_a_default(key: str, tmp_path: Path) -> None:
    """Any number of heads fits the shapes: ours must not be chosen in silence."""
    files = write(tmp_path, CONFIG, synthetic(CONFIG))
    files[1].write_text(json.dumps({**CONFIG, key: None}))
    with pytest.raises(UserError, match=f"{key} must not be null"):
        import_weights("cosmicfish", *files, tmp_path / "out")


@pytest.mark.parametrize("vocab_size", ["300", [300], 3.5, True])
def test_a_vocabulary_size_of_another_type_with_a_tokenizer(vocab_size: Any, tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG, synthetic(CONFIG))
    files[1].write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    Tokenizer.bytes().save(tmp_path)
    with pytest.raises(UserError, match="vocab_size: input should be a valid integer"):
        import_weights("cosmicfish", *files, tmp_path / "out", tokenizer=tmp_path)


def test_more_steps_than_can_be_unrolled_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="depth 20000 is beyond"):
        imported(tmp_path, {**CONFIG, "hrm_max_steps": 20_000}, synthetic(CONFIG))
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    """With a tokenizer of fewer ids the rest is never predicted; half precision becomes float32."""
    config = {**CONFIG, "vocab_size": 300}
    weights = synthetic(config)
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path)
    model = imported(tmp_path, config, halves, tokenizer=tmp_path)
    assert model.embedding.weight.dtype == torch.float32
    torch.testing.assert_close(model.embedding.weight, halves["wte.weight"].float())
    assert model(torch.tensor([[5, 299]])).logits.shape == (1, 2, 257)
    assert hrmlm.load_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint
    assert open_checkpoint(tmp_path / "out").training is None
    with pytest.raises(UserError, match="exists already"):
        imported(tmp_path, config, halves)
    small = tmp_path / "small"
    small.mkdir()
    with pytest.raises(UserError, match="257 ids and the model only 40"):
        imported(small, CONFIG, synthetic(CONFIG), tokenizer=tmp_path)


def test_a_configuration_inside_a_larger_file(tmp_path: Path) -> None:
    weights, config = write(tmp_path, {"config": CONFIG, "note": "kept"}, synthetic(CONFIG))
    assert import_weights("cosmicfish", weights, config, tmp_path / "out").config.max_steps == 5
    config.write_text("[1]")
    with pytest.raises(UserError, match="no configuration"):
        import_weights("cosmicfish", weights, config, tmp_path / "two")
