"""Runs over several corpora: exact resume, validation, and what may not change."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hrmlm.checkpoint import load_model
from hrmlm.cli import main
from hrmlm.data.corpora import Corpora
from hrmlm.data.prepare import prepare
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.evaluation.loss import evaluate_ids
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import recipe_model, train
from tests.training.helpers import Stop, StopAfter, assert_same_run, record, settings, tiny


def mixed(first: Path, second: Path, weights: tuple[float, float] = (0.75, 0.25), **changes: Any) -> Recipe:
    mix = [{"path": str(path), "weight": weight} for path, weight in zip((first, second), weights, strict=True)]
    return Recipe.parse(settings(None, **{"data.mix": mix, **changes}), "recipe")


@pytest.mark.parametrize("stopped", [1, 3, 5])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_the_uninterrupted_one(
    stopped: int, workers: int, data: Path, other_data: Path, tmp_path: Path
) -> None:
    recipe = mixed(data, other_data, **{"data.workers": workers, "training.accumulation": 2})
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", reporter=StopAfter(stopped))
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_what_was_read_is_reported(data: Path, other_data: Path, tmp_path: Path, capsys: Any) -> None:
    result = train(mixed(data, other_data, **{"training.steps": 10}), tmp_path / "run")
    first, second = result.corpora
    assert [first.path, second.path] == [str(data), str(other_data)]
    assert [first.tokens, second.tokens] == [15 * 16, 5 * 16]
    assert [first.share, second.share] == [0.75, 0.25]
    windows = (len(PreparedData.open(other_data).split("train")) - 1) // 16
    assert second.epochs == 5 / windows
    assert json.loads((tmp_path / "run" / "result.json").read_text())["corpora"][1]["tokens"] == 80
    single = train(tiny(data, **{"training.steps": 2}), tmp_path / "single")
    assert [usage.share for usage in single.corpora] == [1.0]
    file = tmp_path / "run" / "recipe.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "training.steps=11", "--out", str(tmp_path / "run"), "--resume"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "272" in told  # 17 of 22 windows: the third period of four has begun
    assert "77.27%" in told


def test_validation_is_told_for_each_and_together_by_share(data: Path, other_data: Path, tmp_path: Path) -> None:
    train(mixed(data, other_data, (0.6, 0.2)), tmp_path / "run")
    line = record(tmp_path / "run", "eval")[-1]
    model = load_model(RunDirectory(tmp_path / "run").newest())
    losses, sizes = [], []
    for path, tokens in ((data, 75), (other_data, 25)):  # of eval_tokens = 100
        prepared = PreparedData.open(path)
        report = evaluate_ids(model, prepared.split("valid")[:tokens], prepared.tokenizer, window=16)
        losses.append(report.nats_per_token)
        sizes.append(report.bytes / report.tokens)
        told = line["corpora"][path.resolve().name if path == data else f"{path.resolve().name}-1"]
        assert told["loss"] == pytest.approx(report.nats_per_token, rel=1e-5)
        assert told["bits_per_byte"] == pytest.approx(report.bits_per_byte, rel=1e-5)
    loss = 0.75 * losses[0] + 0.25 * losses[1]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert line["bits_per_byte"] == pytest.approx(loss / math.log(2) / (0.75 * sizes[0] + 0.25 * sizes[1]), rel=1e-5)


def test_directories_of_like_names_are_told_apart(data: Path, tmp_path: Path) -> None:
    """Also where a name with a number is another directory's own."""
    paths = [tmp_path / "a" / "d-2", tmp_path / "b" / "d", tmp_path / "c" / "d"]
    for path in paths:
        shutil.copytree(data, path)
    found = Corpora.open(paths, [1, 1, 1]).valid_ids(30)
    assert [len(ids) for ids in found.values()] == [10, 10, 10]


def test_a_mixture_of_one_is_that_corpus(data: Path, tmp_path: Path) -> None:
    train(tiny(data), tmp_path / "path")
    train(tiny(None, **{"data.mix": [{"path": str(data), "weight": 3}]}), tmp_path / "mix")
    assert_same_run(tmp_path / "mix", tmp_path / "path")
    train(tiny(data, **{"training.steps": 7}), tmp_path / "mix", resume=True)


def test_directories_may_move_but_content_and_shares_may_not_change(
    data: Path, other_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        train(mixed(data, other_data), tmp_path / "run", reporter=StopAfter(3))
    for recipe in (mixed(data, other_data, (0.5, 0.5)), mixed(data, data), mixed(other_data, data), tiny(data)):
        with pytest.raises(UserError, match=r"same prepared data in the same shares.*training\.init_from"):
            train(recipe, tmp_path / "run", resume=True)
    moved = shutil.copytree(other_data, tmp_path / "elsewhere")
    assert train(mixed(data, moved, (3, 1)), tmp_path / "run", resume=True).step == 6


def test_corpora_of_different_tokenizers(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"{n}: the cat sat on the mat {n}" for n in range(99)))
    prepare([str(tmp_path / "a.txt")], tmp_path / "bpe", vocab_size=260, separator="\n\n")
    with pytest.raises(UserError, match=r"bpe was prepared with tokenizer .* --tokenizer .*tokenizer\.json"):
        train(mixed(data, tmp_path / "bpe"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mistakes(data: Path, short_data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.data: path and mix exclude each other"):
        tiny(data, **{"data.mix": [{"path": str(data)}]})
    with pytest.raises(UserError, match=r"recipe\.data\.mix\.0\.wieght: unknown key, did you mean 'weight'"):
        tiny(None, **{"data.mix": [{"path": "x", "wieght": 1}]})
    with pytest.raises(UserError, match=r"recipe\.data\.mix\.0\.weight.*greater than 0"):
        tiny(None, **{"data.mix": [{"path": "x", "weight": 0}]})
    with pytest.raises(UserError, match=r"share 1e-06 of a corpus is too small"):
        train(mixed(data, short_data, (1, 1e-6)), tmp_path / "run")
    with pytest.raises(UserError, match=r"nowhere is not a directory"):
        train(mixed(data, tmp_path / "nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert recipe_model(mixed(data, short_data)).vocab_size == 257


def test_unread_data_are_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hrmlm.data import verify
    from tests.training.helpers import Listener

    monkeypatch.setattr(verify, "LARGEST", 10)
    listener = Listener()
    train(tiny(data, **{"training.steps": 1}), tmp_path / "run", reporter=listener)
    assert any("not compared with their hashes" in note for note in listener.notes)
    train(tiny(data, **{"training.steps": 1, "data.verify": "always"}), tmp_path / "other", reporter=listener)
    assert len(json.loads((tmp_path / "other" / "verified.json").read_text())) == 2
    assert not any("not compared" in note for note in listener.notes)
