"""Reports: the numbers are those of the runs, the page needs nothing but itself, and the words claim no more."""

import copy
import json
import random
import re
import shlex
import shutil
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hrmlm.checkpoint import load_model, open_checkpoint
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.evaluation.loss import evaluate_data
from hrmlm.studies.collect import Findings, collect, loss_of
from hrmlm.studies.document import Code, Fold, Heading, Items, Table, Text, html, markdown
from hrmlm.studies.measures import frozen, roles, zero_input
from hrmlm.studies.report import build, write
from hrmlm.studies.runner import run_study
from hrmlm.studies.statistics import t_quantile
from hrmlm.training.recipe import load_recipe
from hrmlm.training.train import train
from tests.studies.helpers import run_here, search_here, study
from tests.test_cli import call
from tests.training.helpers import tiny

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and remembers attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def findings(finished: Path) -> Findings:
    return collect(finished)


@pytest.fixture(scope="module")
def page(findings: Findings, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(findings, tmp_path_factory.mktemp("report"))[0].read_text("utf-8")


def test_means_and_intervals_are_those_of_the_results(findings: Findings, finished: Path) -> None:
    losses: dict[str, dict[int, float]] = {}
    for path in finished.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        losses.setdefault(result["condition"], {})[result["seed"]] = result["loss"]
    assert losses.keys() == {"hrm", "plain"}
    for condition in findings.conditions:
        numbers = list(losses[condition.label].values())
        assert condition.loss is not None
        assert condition.loss.n == 3
        assert condition.loss.mean == pytest.approx(statistics.fmean(numbers))
        assert condition.loss.half_width == pytest.approx(t_quantile(2) * statistics.stdev(numbers) / 3**0.5)
    differences = [losses["hrm"][seed] - losses["plain"][seed] for seed in range(3)]
    (difference,) = findings.differences().values()
    assert difference.mean == pytest.approx(statistics.fmean(differences))


def test_page_is_complete_in_itself(page: str) -> None:
    parsed = Page(page)
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"<script|<iframe|@import|url\((?!#)", page)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids)), "two elements with one id: the second is drawn with the parts of the first"
    for _, name, value in parsed.attributes:
        for target in re.findall(r"url\(#([^)]+)\)", value) if name != "style" else re.findall(r"url\(#(.+?)\)", value):
            assert target in ids
        if name == "xlink:href":
            assert value[1:] in ids
    assert 'name="viewport"' in page
    assert "prefers-color-scheme:dark" in page
    assert "max-width:56rem" in page


def test_pictures_are_there_and_take_the_colours_of_the_page(page: str) -> None:
    pictures = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(pictures) == 5, "loss against steps, tokens, FLOPs and time; latency against parameters"
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "currentColor" in picture
        assert {f"var(--s{i})" for i in range(2)} <= set(re.findall(r"var\(--s\d\)", picture))
        assert not re.search(r"(fill|stroke): #(?!ffffff)", picture), "a colour that one of the two schemes hides"
        assert "aria-label" in picture
    for name in ("--s0", "--s1"):
        assert page.count(f"{name}:") == 2, "one for light, one for dark"


def test_every_cell_can_be_read_on_a_phone(page: str) -> None:
    parsed = Page(page)
    labels = [value for tag, name, value in parsed.attributes if (tag, name) == ("td", "data-label")]
    assert len(labels) == page.count("<td"), "narrow pages show the name of the column in front of each cell"


def test_markdown_has_the_same_numbers(findings: Findings, tmp_path: Path) -> None:
    text = write(findings, tmp_path)[1].read_text("utf-8")
    for condition in findings.conditions:
        assert condition.loss is not None
        assert f"{condition.loss.mean:.3f} ± {condition.loss.half_width:.3f}" in text
    for target in re.findall(r"\]\((\S+)\)", text):
        ElementTree.parse(tmp_path / target)
    for section in ("Results", "Paired differences", "Curves", "Latency and memory", "Roles", "How to repeat it"):
        assert f"## {section}\n" in text
    assert "| a figure | " in text
    assert "| 4.5 | somewhere else; a paper |" in text


def test_summary_speaks_of_three_seeds_and_of_no_best_run(findings: Findings) -> None:
    """R31: mean and spread over at least three seeds."""
    text = " ".join(findings.summary())
    assert "6 of 6 runs are finished." in text
    assert "±" in text
    assert "fewer than 3 seeds" not in text
    assert "Compared seed by seed with plain" in text or "Not to be told apart from plain" in text


def test_two_seeds_support_no_claim(data: Path, tmp_path: Path) -> None:
    run_here(study(data, seeds=2, budget={"steps": 2}), tmp_path / "out")
    text = " ".join(collect(tmp_path / "out").summary())
    assert "fewer than 3 seeds: that is too few" in text
    assert "Compared seed by seed" not in text
    assert "Not to be told apart" not in text


def test_unfinished_studies_say_so(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here(study(data, seeds=1, budget={"steps": 2}), out)
    for path in list(out.glob("runs/*/result.json"))[:1]:
        result = json.loads(path.read_text())
        path.write_text(json.dumps({**result, "loss": "low"}))
        with pytest.raises(UserError, match=r"is damaged \(loss: .*\); remove it and run the study again"):
            collect(out)
        path.unlink()
    assert "1 of 2 runs are finished, 1 are still to be done" in collect(out).summary()[0]
    for path in out.glob("runs/*/result.json"):
        path.unlink()
    findings = collect(out)
    assert findings.summary()[1] == "There is no result yet."
    assert write(findings, tmp_path / "report")[0].is_file()


def test_the_result_alone_is_enough_to_repeat_it(finished: Path, data: Path, tmp_path: Path) -> None:
    """R31: a run and its number again, from what result.json says."""
    path = next(finished.glob("runs/hrm-*/result.json"))
    result = json.loads(path.read_text())
    evaluation = result["evaluation"]
    checkpoint = open_checkpoint(finished / evaluation["checkpoint"])
    settings = {key: evaluation[key] for key in ("window", "stride", "batch_size", "first_tokens")}
    prepared = PreparedData.open(evaluation["data_path"])
    assert prepared.meta.fingerprint == evaluation["data"]
    again = evaluate_data(load_model(checkpoint), prepared, evaluation["split"], **settings)
    assert again.nats_per_token == result["loss"]

    recipe = load_recipe(str(path.parent / "train" / "recipe.yaml"))
    assert recipe.to_dict() == result["recipe"]
    train(recipe, tmp_path / "again")
    second = load_model(open_checkpoint(tmp_path / "again" / "checkpoints" / checkpoint.path.name))
    assert evaluate_data(second, prepared, evaluation["split"], **settings).nats_per_token == result["loss"]
    for key in ("seed", "hrmlm", "code", "torch", "threads"):
        assert result[key] is not None


def test_search_reports_the_best_of_each_arm_and_warns(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    space = {"optimizer.lr": [1e-5, 1e-2]}
    run_here(study(data, seeds=1, budget={"steps": 6}, search={"space": space}), out)
    findings = collect(out)
    best = findings.best_by_arm()
    assert {arm: c.label for arm, c in best.items()} == {"hrm": "hrm, lr=0.01", "plain": "plain, lr=0.01"}
    assert findings.baseline == "hrm, lr=0.01"
    assert findings.differences().keys() == {"plain, lr=0.01"}, "the best of each arm, not every trial with the first"
    text = " ".join(findings.summary())
    assert "best of 2" in text
    assert "flatters" in text
    assert "edge" not in text, "two values have no middle"


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of everything inside a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from leaves(inner, (*path, key))


@pytest.fixture(scope="module")
def short(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two runs of one step, as `hrmlm study run` leaves it."""
    out = tmp_path_factory.mktemp("short") / "out"
    command = "hrmlm prepare some.txt --out DIR"
    run_study(study(data, seeds=1, budget={"steps": 1}, evaluation={"tokens": 50}, prepare=command), out)
    return out


@pytest.mark.parametrize("file", ["result.json", "plan.json", "error.json", "metrics.jsonl"])
def test_a_damaged_file_is_one_clear_error(
    file: str, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any key of any file missing, or something else: a report, or one line that names the file. No traceback."""
    monkeypatch.setattr("hrmlm.studies.figures.curves", lambda *_: None)  # slow, and reads nothing else
    out = shutil.copytree(short, tmp_path / "out")
    run = next(out.glob("runs/*"))
    if file == "error.json":
        (run / "result.json").unlink()
        (run / file).write_text(json.dumps({"id": run.name, "error": "OSError", "message": "no", "traceback": ""}))
    path = {"plan.json": out, "metrics.jsonl": run / "train"}.get(file, run) / file
    values = [
        json.loads(line) for line in (path.read_text().splitlines() if file.endswith("l") else [path.read_text()])
    ]
    bad: list[list[Any]] = [[[]], [None], [5], ["x"]]
    for number, value in enumerate(values):
        for *keys, last in leaves(value):
            for instead in ("gone", None, "x", [], {}, -1):
                changed = copy.deepcopy(values)
                inner = changed[number]
                for key in keys:
                    inner = inner[key]
                if instead == "gone":
                    del inner[last]
                else:
                    inner[last] = instead
                bad.append(changed)
    refused = set()
    for lines in bad[:4] + random.Random(0).sample(bad, min(len(bad), 150)):
        path.write_text("\n".join(json.dumps(line) for line in lines))
        try:
            markdown("t", build(collect(out)))
        except UserError as error:
            refused.add(str(error))
    assert all(file in told and "\n" not in told for told in refused)
    assert bool(refused) == (file in ("result.json", "plan.json"))


def test_an_unfinished_search_says_so(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = {"engine": "tpe", "trials": 2, "space": {"optimizer.lr": [1e-3, 1e-2]}}
    values = study(data, seeds=1, budget={"steps": 1}, evaluation={"tokens": 50}, search=search)
    run_study(values, tmp_path / "out")
    assert collect(tmp_path / "out").summary()[0].endswith("runs are finished."), "trials of equal values share a run"
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "complete": False}))
    for run in sorted((tmp_path / "out" / "runs").glob("plain-*")):
        shutil.rmtree(run)
    assert "of 4 runs are finished, " in collect(tmp_path / "out").summary()[0]
    assert "are still to be done: what follows is preliminary" in collect(tmp_path / "out").summary()[0]


def test_the_best_at_the_edge_of_a_grid_is_told(data: Path, tmp_path: Path) -> None:
    space = {"optimizer.lr": [1e-6, 1e-5, 1e-2], "schedule.warmup": [1]}
    values = study(data, seeds=1, budget={"steps": 4}, search={"space": space}, evaluation={"tokens": 50})
    run_here(values, tmp_path / "out")
    assert "better ones may lie beyond: lr=0.01 of hrm and lr=0.01 of plain." in " ".join(
        collect(tmp_path / "out").summary()
    )


def test_a_published_figure_stands_beside_the_best_of_its_arm(data: Path, tmp_path: Path) -> None:
    """Not beside the first that was tried, and it says of how many it is the best."""
    item = {"condition": "hrm", "value": 1.0, "what": "a figure", "setting": "s", "source": "a paper"}
    space = {"optimizer.lr": [1e-5, 1e-2]}
    values = study(data, seeds=1, budget={"steps": 6}, search={"space": space}, published=[item])
    run_here(values, tmp_path / "out")
    findings = collect(tmp_path / "out")
    best = findings.best_by_arm()["hrm"].loss
    assert best is not None
    (row,) = [line for line in markdown("t", build(findings)).splitlines() if line.startswith("| a figure |")]
    assert f"| {best.mean:.3f} |" in row
    assert "lr=0.01: D = 32," in row
    assert "best of 2 finished settings" in row


GRID = {"grid": {"optimizer.lr": [1e-5, 1e-2]}, "seeds": 3, "budget": {"steps": 4}, "evaluation": {"tokens": 50}}


@pytest.mark.parametrize("baseline", [None, "plain"])
def test_arms_of_a_grid_are_compared_at_the_same_settings(baseline: str | None, data: Path, tmp_path: Path) -> None:
    run_here(study(data, **GRID, baseline=baseline), tmp_path / "out")
    findings = collect(tmp_path / "out")
    base, other = ("hrm", "plain") if baseline is None else ("plain", "hrm")
    losses = {c.label: c.numbers(loss_of) for c in findings.conditions}
    differences = findings.differences()
    assert differences.keys() == {f"{other}, lr=1e-05", f"{other}, lr=0.01"}
    for label, difference in differences.items():
        theirs = losses[label.replace(other, base)]
        assert difference.mean == pytest.approx(statistics.fmean(losses[label][s] - theirs[s] for s in range(3)))
    assert f"{base} with the same settings" in markdown("t", build(findings))


def test_a_named_condition_is_the_baseline_of_all(data: Path, tmp_path: Path) -> None:
    run_here(study(data, **{**GRID, "seeds": 1}, baseline="plain, lr=0.01"), tmp_path / "out")
    findings = collect(tmp_path / "out")
    assert findings.baseline == "plain, lr=0.01"
    assert findings.differences().keys() == {"hrm, lr=1e-05", "hrm, lr=0.01", "plain, lr=1e-05"}


def test_the_printed_commands_give_the_number_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R31, also where only a part of the split is scored."""
    run_here(study(data, seeds=1, budget={"steps": 2}, evaluation={"tokens": 60}), tmp_path / "out")
    findings = collect(tmp_path / "out")
    code = next(part.text for part in build(findings) if isinstance(part, Code))
    monkeypatch.chdir(tmp_path)
    for line in code.splitlines()[-2:]:
        assert call(*shlex.split(line)[1:], *(["--json"] if "evaluate" in line else [])) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["nats_per_token"]
    assert loss == findings.every_result()[0]["loss"]


def test_what_freezing_costs_is_paired_by_seed(findings: Findings) -> None:
    (condition,) = [c for c in findings.conditions if c.label == "hrm"]
    found = [r["measures"]["roles"] for r in condition.results.values()]
    more = statistics.fmean(r["loss_frozen"]["slow"] - r["loss"] for r in found)
    (row, *_) = [line for line in markdown("t", build(findings)).splitlines() if line.startswith("| slow frozen |")]
    assert f"| {more:+.3f} ± " in row


def test_the_report_tells_data_and_shared_settings(short: Path) -> None:
    text = markdown("t", build(collect(short)))
    assert "bytes of 257 ids, tokens: train " in text
    assert "hrmlm prepare some.txt --out DIR" in text
    assert "| training.batch_size | 2 |" in text
    assert "| optimizer.weight_decay | 0.1 |" in text


def test_a_preliminary_report_knows_the_rates_that_are_to_come(data: Path, tmp_path: Path) -> None:
    run_here(study(data, **{**GRID, "seeds": 1}), tmp_path / "out")
    for path in (tmp_path / "out").glob("runs/*lr-0.01*/result.json"):
        path.unlink()
    text = markdown("t", build(collect(tmp_path / "out")))
    assert "Peak learning rates: 1e-05 for hrm, lr=1e-05, plain, lr=1e-05; 0.01 for" in text


def test_a_nested_space_is_reported_as_a_dotted_one(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = {"engine": "tpe", "trials": 1, "space": {"optimizer": {"lr": [1e-3]}}}
    search_here(study(data, seeds=1, budget={"steps": 1}, search=search), tmp_path / "out")
    labels = [c.label for c in collect(tmp_path / "out").conditions]
    assert labels == ["hrm, trial 0: lr=0.001", "plain, trial 0: lr=0.001"]


def test_what_users_write_is_shown_as_text() -> None:
    evil = "<script>alert(1)</script> & | `x`"
    parts = [Heading(evil), Text(evil), Items([evil]), Code(evil), Table([evil, "b"], [[evil, evil]], evil)]
    parts.append(Fold(evil, parts[:2]))
    page = html(evil, parts)
    Page(page)
    assert "<script" not in page
    row = markdown("t", [Table(["a", "b"], [[evil, "1"]])]).splitlines()[-1]
    assert row.replace("\\|", "").count("|") == 3


def test_frozen_modules_keep_their_state_and_come_back(finished: Path, data: Path) -> None:
    path = next(finished.glob("runs/hrm-*/train/checkpoints/step-*"))
    model, prepared = load_model(open_checkpoint(path)), PreparedData.open(data)

    def loss() -> float:
        return evaluate_data(model, prepared, "valid", window=16, first_tokens=200).total_nats

    before = loss()
    with frozen(model, "slow"):
        inside = loss()
    assert inside != before
    assert loss() == before
    with zero_input(model):
        assert loss() != before
    assert loss() == before
    found = roles(model, prepared, "valid", 16, 4)
    assert found["loss_at_depth"]["2"] == pytest.approx(found["loss"])
    assert set(found["loss_frozen"]) == {"input_block", "fast", "slow"}
    gates = {a["name"]: a["gate"] for a in found["applications"]}
    assert gates["input"] is None
    assert all(0 < gates[name] < 1 for name in gates if name != "input")


def test_freezing_the_only_path_to_the_output_makes_the_model_blind(data: Path, tmp_path: Path) -> None:
    """With both cells frozen every position reads out the prototypes: one distribution for all."""
    train(tiny(data, "hrm_lm", **{"training.steps": 1}), tmp_path / "run")
    model = load_model(open_checkpoint(next((tmp_path / "run" / "checkpoints").glob("step-*"))))
    import torch

    with frozen(model, "fast"), frozen(model, "slow"), torch.no_grad():
        logits_BLV = model(torch.arange(10)[None]).logits
    assert torch.equal(logits_BLV[:, :1].expand_as(logits_BLV), logits_BLV)


def test_build_works_without_results(findings: Findings) -> None:
    empty = Findings(findings.path, findings.study, findings.plan, [], 0)
    assert build(empty)
    assert loss_of({}) is None
