"""Checkpoints: every weight once, ties real, nothing that runs code, and what does not fit is named (R19 to R22)."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hrmlm
from hrmlm.checkpoint import (
    MANIFEST,
    WEIGHTS,
    load_model,
    load_tokenizer,
    load_weights,
    named_tensors,
    open_checkpoint,
    save_checkpoint,
    write_manifest,
)
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.models import build_model, model_config
from tests.families import FAMILIES

ANY = next(iter(FAMILIES))
EACH = pytest.mark.parametrize("family", FAMILIES)
TOKENS = torch.arange(12).view(2, 6)


def saved(path: Path, family: str = ANY, **changes: Any) -> nn.Module:
    model = build_model({**FAMILIES[family], **changes}).eval()
    save_checkpoint(path, model)
    return model


@EACH
def test_same_logits_after_loading(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "c", family)
    loaded = hrmlm.load(tmp_path / "c")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.config == model.config
    assert not loaded.training
    assert named_tensors(loaded).keys() == named_tensors(model).keys()


@EACH
def test_file_holds_each_weight_once_under_its_plain_name(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "c", family, d_model=64)
    stored = load_file(tmp_path / "c" / WEIGHTS)
    assert stored.keys() == named_tensors(model).keys()
    assert not any("_orig_mod" in name or "module." in name or "_compiled" in name for name in stored)
    payload = 4 * sum(p.numel() for p in model.parameters())
    assert (tmp_path / "c" / WEIGHTS).stat().st_size == pytest.approx(payload, rel=0.03)  # 0.03: the header, tiny model
    large = saved(tmp_path / "large", family, d_model=128, vocab_size=1000)
    payload = 4 * sum(p.numel() for p in large.parameters())
    assert (tmp_path / "large" / WEIGHTS).stat().st_size == pytest.approx(payload, rel=0.01)


@EACH
def test_the_tie_is_real_after_loading(family: str, tmp_path: Path) -> None:
    saved(tmp_path / "c", family)
    model = hrmlm.load(tmp_path / "c")
    before = model(TOKENS).logits
    with torch.no_grad():
        model.embedding.weight[60] += 1.0  # an id that is not in TOKENS: only the head can show it
    after = model(TOKENS).logits
    assert (after[..., 60] != before[..., 60]).any()
    assert torch.equal(after[..., :60], before[..., :60])


class Shared(nn.Module):
    """Tied embedding and head, and one core that three names reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.layers = nn.ModuleList([self.first])
        self.register_buffer("table", torch.arange(3.0))


def test_shared_modules_are_stored_once(tmp_path: Path) -> None:
    model, other = Shared(), Shared()
    tensors = named_tensors(model)
    assert set(tensors) == {"embedding.weight", "first.weight", "first.bias", "table"}
    save_file({name: t.detach() for name, t in tensors.items()}, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert other.head.weight is other.embedding.weight
    assert other.layers[0].weight is other.second.weight is other.first.weight
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    (other.head(other.second(other.embedding(torch.tensor([1])))).sum()).backward()
    optimizer.step()
    assert torch.equal(other.head.weight, other.embedding.weight)


def test_ties_in_foreign_files(tmp_path: Path) -> None:
    """The second name of a tie may be there with the same values; with others the file contradicts the model."""
    tensors = {name: t.detach().clone() for name, t in named_tensors(Shared()).items()}
    twice = {**tensors, "head.weight": tensors["embedding.weight"].clone()}
    save_file(twice, tmp_path / "w")
    load_weights(Shared(), tmp_path / "w")
    save_file({**twice, "head.weight": twice["head.weight"] + 1}, tmp_path / "w")
    with pytest.raises(UserError, match=r"head.weight differs from embedding.weight, to which the model ties it"):
        load_weights(Shared(), tmp_path / "w")


def test_what_does_not_fit_is_named_completely(tmp_path: Path) -> None:
    tensors = {name: t.detach().clone() for name, t in named_tensors(Shared()).items()}
    del tensors["first.bias"], tensors["table"]
    tensors["first.weight"] = torch.zeros(4, 3)
    tensors["extra.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "w")
    model = Shared()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_weights(model, tmp_path / "w")
    for part in (
        "missing first.bias",
        "missing table",
        "unknown extra.weight",
        "first.weight has shape (4, 3) where the model needs (4, 4)",
    ):
        assert part in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@EACH
def test_each_missing_weight_is_noticed(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "c", family)
    tensors = load_file(tmp_path / "c" / WEIGHTS)
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "w")
        with pytest.raises(UserError, match=f"missing {name}$"):
            load_weights(model, tmp_path / "w")


def test_configuration_is_unchanged_after_three_rounds(tmp_path: Path) -> None:
    for family, settings in FAMILIES.items():
        first = model_config(settings).model_dump(mode="json")
        path = tmp_path / f"{family}-0"
        saved(path, family)
        for round_ in (1, 2, 3):
            model = load_model(open_checkpoint(path))
            path = tmp_path / f"{family}-{round_}"
            save_checkpoint(path, model)
            assert open_checkpoint(path).model == first
    assert (tmp_path / f"{ANY}-0" / WEIGHTS).read_bytes() == (tmp_path / f"{ANY}-3" / WEIGHTS).read_bytes()


def test_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    with pytest.raises(UserError, match="exists already"):
        saved(tmp_path / "c")


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.update(changes)
    write_manifest(path, {k: v for k, v in manifest.items() if v is not ...})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 3}, "has checkpoint format 3 and this version reads 1 and 2"),
        ({"format": ...}, "does not describe a checkpoint"),
        ({"model": ...}, "does not describe a checkpoint"),
        ({"model": "transformer"}, "does not describe a checkpoint"),
        ({"files": []}, "does not describe a checkpoint"),
        ({"files": {}}, "does not describe a checkpoint"),
        ({"files": {WEIGHTS: {}}}, "does not describe a checkpoint"),
        ({"training": [1]}, "does not describe a checkpoint"),
        ({"training": {"step": 3}}, "does not describe a checkpoint"),
        ({"model": {"family": "unheard_of"}}, "unknown family 'unheard_of'"),
        ({"model": {**FAMILIES[ANY], "depht": 3}}, "unknown key"),
    ],
)
def test_foreign_manifests(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    saved(tmp_path / "c")
    change_manifest(tmp_path / "c", **changes)
    with pytest.raises(UserError) as error:
        hrmlm.load(tmp_path / "c")
    assert told in str(error.value)
    assert str(tmp_path / "c") in str(error.value)


@pytest.mark.parametrize("change", [{"n_heads": 4}, {"n_cycles": 3}, {"context": 10**12}])
def test_edited_manifest_is_noticed_even_where_the_shapes_still_fit(change: dict[str, int], tmp_path: Path) -> None:
    saved(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    manifest["model"].update(change)
    (tmp_path / "c" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="was changed after it was written"):
        open_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{}", ""])
def test_manifests_of_another_kind(content: str, tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / MANIFEST).write_text(content)
    with pytest.raises(UserError):
        open_checkpoint(tmp_path / "c")


def test_foreign_directories(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"wte.weight": torch.zeros(2, 2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match="not a checkpoint of hrmlm"):
        hrmlm.load(tmp_path / "hf")
    with pytest.raises(UserError, match="does not exist"):
        hrmlm.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a directory"):
        hrmlm.load(tmp_path / "hf" / "config.json")


def test_files_outside_the_directory_are_not_touched(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "secret").write_text("x")
    files = json.loads((tmp_path / "c" / MANIFEST).read_text())["files"]
    change_manifest(tmp_path / "c", files={**files, "../secret": {"bytes": 1, "sha256": "0"}})
    with pytest.raises(UserError, match="does not describe a checkpoint"):
        open_checkpoint(tmp_path / "c")


def test_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    model = saved(tmp_path / "without")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(open_checkpoint(tmp_path / "without"))
    save_checkpoint(tmp_path / "c", model, tokenizer=Tokenizer.bytes())
    assert load_tokenizer(open_checkpoint(tmp_path / "c")).fingerprint == Tokenizer.bytes().fingerprint
    change_manifest(tmp_path / "c", tokenizer_fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=f"{Tokenizer.bytes().fingerprint}.*0123456789abcdef"):
        load_tokenizer(open_checkpoint(tmp_path / "c"))


def test_files_have_the_permissions_that_the_umask_asks_for(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        saved(tmp_path / "c")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "c").iterdir()} == {0o640}


def test_moved_checkpoint_loads(tmp_path: Path) -> None:
    model = saved(tmp_path / "c")
    shutil.move(tmp_path / "c", tmp_path / "elsewhere")
    assert torch.equal(hrmlm.load(tmp_path / "elsewhere")(TOKENS).logits, model(TOKENS).logits)


def test_checkpoint_of_every_earlier_format_loads() -> None:
    """Files written when format 1 was new; they stay as they are, whatever the code becomes."""
    path = Path(__file__).parent / "fixtures" / "checkpoint-format-1"
    ids = hrmlm.load_tokenizer(path).encode("Hello")
    with torch.no_grad():
        logits_V = hrmlm.load(path)(torch.tensor([ids])).logits[0, -1]
    expected = torch.tensor([0.073668, -0.01036, -0.121043, 0.043581, 0.054017, -0.039936, -0.00517, -0.070128])
    torch.testing.assert_close(logits_V[:8], expected, atol=2e-6, rtol=1e-4)
