"""Recipes: the shipped ones are valid and have the published sizes; mistakes are told in one line before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hrmlm
from hrmlm.data.prepare import prepare
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost_of
from hrmlm.training.recipe import Recipe, load_recipe, recipe_names, scale_warning
from hrmlm.training.train import model_config_for, train
from tests.training.helpers import settings, tiny

MILLIONS = {
    "hrm-lm-1.2b-2x2": 1_229,
    "hrm-lm-1.2b-2x4": 1_229,
    "hrm-lm-1.2b-4x3": 1_229,
    "hrm-lm-359m-nt36": 359,
    "transformer-l2": 743,
    "transformer-l4": 1_280,
    "transformer-l12": 3_430,
    "universal-1.2b": 1_218,
    "cosmicfish-82m": 82.77,
}


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_is_valid(name: str) -> None:
    recipe = load_recipe(name)
    assert Recipe.parse(recipe.to_dict(), "recipe") == recipe
    assert yaml.safe_load(yaml.safe_dump(recipe.to_dict())) == recipe.to_dict()
    assert recipe.window <= recipe.model_config_of().context


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_presets_have_the_published_sizes(name: str, millions: int) -> None:
    assert cost_of(load_recipe(name).model).parameters == pytest.approx(millions * 1e6, rel=1e-3)
    with torch.device("meta"):
        assert sum(p.numel() for p in hrmlm.build(name).parameters()) == pytest.approx(millions * 1e6, rel=1e-3)


def test_every_published_size_has_a_recipe() -> None:
    assert set(MILLIONS) <= set(recipe_names())


def test_recipe_by_path_by_name_and_by_path_in_the_package() -> None:
    assert load_recipe("recipes/transformer-l2.yaml") == load_recipe("transformer-l2")


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


MISTAKES = {
    "training.stepz=5": "recipe.training.stepz: unknown key, did you mean 'steps'?",
    "model.n_layers=3": "model.n_layers: unknown key, a setting of transformer",
    "model.n_cycle=3": "model.n_cycle: unknown key, did you mean 'n_cycles'?",
    "optimiser.lr=1": "did you mean 'optimizer'?",
    "steps=5": "did you mean 'training.steps'?",
    "stepz=5": "did you mean 'training.steps'?",
    "learning_rate=1": "unknown key",
    "n_cycles=5": "did you mean 'model.n_cycles'?",
    "batchsize=5": "did you mean 'training.batch_size'?",
    "training.steps": "not of the form section.key=value",
    "training..steps=3": "not of the form section.key=value",
    "=3": "not of the form section.key=value",
    "training.steps=many": "recipe.training.steps: input should be a valid integer",
    "training.steps=0": "greater than 0 (got 0)",
    "training.steps=2.5": "training.steps",
    "training.steps.more=3": "steps is a value, not a section",
    "training.steps=[1": "not valid YAML",
    "training.precision=float8": "'float32', 'bfloat16' or 'bfloat16_weights' (got 'float8')",
    "training.trackers=[mlflow]": "'tensorboard'",
    "training.trackers=[tensorboard, tensorboard]": "the same tracker stands twice",
    "training.seed=99999999999999999999": "training.seed",
    "training.batch_size=1000000000": "training.batch_size: input should be less than or equal to 1048576",
    "training.accumulation=1000000000000": "training.accumulation: input should be less than or equal to 1048576",
    "training.peak_flops=1e-300": "training.peak_flops: input should be greater than or equal to 1000000",
    "optimizer.lr=true": "optimizer.lr: expected a number (got True)",
    "schedule.min_ratio=false": "schedule.min_ratio: expected a number (got False)",
    "data.mix=[{path: x, weight: true}]": "weight: expected a number (got True)",
    "parallel.timeout=1e300": "parallel.timeout",
    "parallel.timeout=nan": "parallel.timeout",
    "optimizer.lr=-1": "greater than 0 (got -1)",
    "optimizer.lr=nan": "optimizer.lr",
    "optimizer.lr=inf": "optimizer.lr",
    "optimizer.betas=[0.9,1.0]": "less than 1",
    "optimizer.betas=[0.9]": "optimizer.betas",
    "schedule.kind=linear": "'cosine' or 'wsd' (got 'linear')",
    "schedule.min_ratio=2": "less than or equal to 1",
    "model.family=hmr_lm": "unknown family 'hmr_lm', did you mean 'hrm_lm'?",
    "model.dropout=1.5": "dropout",
    "model.gradient_window=50": "gradient_window 50 exceeds the 3 steps",
    "model.n_heads=5": "d_model 32 must be n_heads (5) times an even head size",
    "data.window=33": "data.window 33 is longer than model.context 32",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_in_overrides(override: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", settings(None))
    with pytest.raises(UserError) as error:
        load_recipe(path, [override])
    assert MISTAKES[override] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1.5e-4", 1.5e-4),
        ("training.steps=7", 7),
        ("data.path=some dir/x=y", "some dir/x=y"),
        ("data.path=null", None),
        ("training.compile=true", "block"),
        ("training.trackers=[tensorboard]", ["tensorboard"]),
        ("schedule.warmup=null", None),
    ],
)
def test_overrides(override: str, value: object, tmp_path: Path) -> None:
    section, key = override.split("=")[0].split(".")
    path = write(tmp_path / "r.yaml", settings(None))
    assert load_recipe(path, [override]).to_dict()[section][key] == value
    assert load_recipe(path).changed([override]) == load_recipe(path, [override])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("model: [1", "cannot be read as YAML"),
        ("\x00\x01", "cannot be read as YAML"),
        ("just text", "is not a recipe"),
        ("", "is not a recipe"),
        ("model: 3", "is not a recipe"),
        ("model: {}", "unknown family None"),
        ("model: {family: transformer}\nextra: 1", "recipe.extra: unknown key"),
        ("model: !!python/object/apply:os.system ['touch marker']", "cannot be read as YAML"),
    ],
)
def test_bad_files(content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load_recipe(write(tmp_path / "r.yaml", content))
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "marker").exists()


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="did you mean 'transformer-l12'"):
        load_recipe("transformer-l13")
    with pytest.raises(UserError, match=r"nowhere/r.yaml does not exist"):
        load_recipe("nowhere/r.yaml")
    with pytest.raises(UserError, match="did you mean"):
        hrmlm.build("hrm-lm-1.2b-2x3")


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ([], False),
        (["training.batch_size=8"], False),  # 4 times
        (["training.batch_size=9"], True),
        (["training.accumulation=5"], True),
        (["training.batch_size=4", "training.accumulation=3"], True),
        (["data.window=3"], True),
        (["training.batch_size=9", "optimizer.lr=1e-4"], False),
    ],
)
def test_changed_batch_without_a_changed_rate_warns(overrides: list[str], warns: bool) -> None:
    base = tiny(None)
    warning = scale_warning(base, base.changed(overrides))
    assert (warning is not None) == warns
    if warning:
        assert "optimizer.lr=0.003" in warning
        assert "cosine" in warning


def test_missing_data(tmp_path: Path, data: Path) -> None:
    for path, told in [
        (None, "data.path is not set"),
        (tmp_path / "nowhere", "nowhere"),
        (tmp_path, "no meta.json"),
    ]:
        with pytest.raises(UserError, match=told):
            train(tiny(path), tmp_path / "run")
    with pytest.raises(UserError, match=r"training.device 'warp' cannot be used"):
        train(tiny(data, **{"training.device": "warp"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_corpus_shorter_than_the_window(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 39)
    (tmp_path / "b.txt").write_text("b" * 39)
    prepare([str(tmp_path / "a.txt")], tmp_path / "data", tokenizer="bytes", valid=[str(tmp_path / "b.txt")])
    recipe = tiny(tmp_path / "data", **{"data.window": None, "model.context": 64})
    with pytest.raises(UserError, match=r"40 tokens are too few for a window of 64 .*fits is 39"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fits = tiny(tmp_path / "data", **{"data.window": 39, "model.context": 64, "training.steps": 2})
    assert train(fits, tmp_path / "run").tokens == 2 * 2 * 39


def test_vocabulary_of_data_and_model(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.vocab_size 200 is smaller than the data's vocabulary of 257"):
        train(tiny(data, **{"model.vocab_size": 200}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert model_config_for(tiny(data), 257).vocab_size == 257
    assert model_config_for(tiny(data, **{"model.vocab_size": 300}), 257).used_vocab == 257
    assert model_config_for(tiny(data, **{"model.vocab_size": 257}), 257).used_vocab is None
    with pytest.raises(UserError, match="used_vocab"):
        model_config_for(tiny(data, **{"model.vocab_size": 300, "model.used_vocab": 256}), 257)


def test_padded_vocabulary_is_never_generated(data: Path, tmp_path: Path) -> None:
    """R08: rows of the embedding that stand for nothing, made as attractive as can be, are never drawn."""
    changes = {"model.vocab_size": 320, "training.steps": 2, "training.eval_every": 0}
    train(tiny(data, **changes), tmp_path / "run")
    model = hrmlm.load(tmp_path / "run")
    assert model.config.used_vocab == 257
    with torch.no_grad():
        model.embedding.weight[257:] = 100 * model.embedding.weight[:63]
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 257)
    for temperature in (0, 1.0, 5.0):
        done = hrmlm.generate(tmp_path / "run", "the ", temperature=temperature, max_new_tokens=20, seed=1)
        assert max(done[0].ids, default=0) < 257
    with pytest.raises(UserError):
        hrmlm.load_tokenizer(tmp_path / "run").decode([300])
