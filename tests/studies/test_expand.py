"""Studies as data: runs with stable ids, fair by construction, and every mistake told before the first run."""

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrmlm.config import StrictConfig
from hrmlm.errors import UserError
from hrmlm.studies.expand import StudyMistakes, expand
from hrmlm.studies.spec import Study, dump_study, flat, load_study, merged, parse_study, study_names
from hrmlm.studies.statistics import ENOUGH
from tests.studies.helpers import TINY, settings, study

HRM = {"family": "hrm_lm", **TINY}


def ids(data: Path, **changes: Any) -> list[str]:
    return [run.id for run in expand(study(data, **changes)).runs()]


def mistakes(data: Path | None, **changes: Any) -> list[str]:
    with pytest.raises(StudyMistakes) as caught:
        expand(study(data, **changes))
    return caught.value.mistakes


def test_conditions_are_arms_times_variants_times_grid_and_runs_those_times_seeds(data: Path) -> None:
    expansion = expand(
        study(
            data,
            variants={"slow": {"optimizer.lr": 1e-4}, "late": {"schedule": {"warmup": 5}}},
            grid={"optimizer.weight_decay": [0.0, 0.1], "model": {"dropout": [0.0, 0.2]}},
        )
    )
    assert len(expansion.conditions) == 2 * 3 * 2 * 2
    runs = expansion.runs()
    assert len(runs) == len({run.id for run in runs}) == 3 * len(expansion.conditions)
    condition = expansion.by_label["hrm, slow, weight_decay=0, dropout=0.2"]
    recipe = condition.recipe
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.model["dropout"]) == (1e-4, 0.0, 0.2)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs), "seed by seed"


def test_ids_depend_on_what_decides_the_result_and_on_nothing_else(data: Path, tmp_path: Path) -> None:
    first = ids(data)
    assert first == ids(data)
    (tmp_path / "elsewhere").symlink_to(data)
    assert first == ids(tmp_path / "elsewhere"), "the same data in another place"
    assert ids(data, seeds=[2, 0, 1]) != first
    assert sorted(ids(data, seeds=[2, 0, 1])) == sorted(first)
    assert set(ids(data, seeds=5)) > set(first)
    base = settings(data)["base"]
    for change in ({"optimizer": {"lr": 1e-3}}, {"training": {"batch_size": 3}}):
        assert not set(ids(data, base=merged(base, change))) & set(first)
    assert not set(ids(data, budget={"steps": 9})) & set(first)
    assert not set(ids(data, evaluation={"tokens": 200})) & set(first)


def test_all_runs_of_a_seed_read_the_same_in_the_same_order(data: Path) -> None:
    for run in expand(study(data)).runs():
        recipe = run.recipe
        assert recipe.training.seed == run.seed
        assert (recipe.data.window, recipe.training.batch_size, recipe.data.path) == (16, 2, str(data))
        assert run.evaluation == {"split": "valid", "window": None, "stride": None, "tokens": 300, "batch_size": 16}


def test_matched_arm_is_within_a_percent(data: Path) -> None:
    expansion = expand(study(data))
    ours, theirs = (expansion.by_label[name].cost.parameters for name in ("plain", "hrm"))
    assert ours == pytest.approx(theirs, rel=0.01)
    assert expansion.by_label["plain"].matched == "parameters of hrm"


def test_budgets_become_steps(data: Path) -> None:
    tokens_per_step = 2 * 16
    by_tokens = expand(study(data, budget={"tokens": 10 * tokens_per_step}))
    assert {run.steps for run in by_tokens.runs()} == {10}
    flops = 1e9
    by_flops = expand(study(data, budget={"flops": flops}))
    for run in by_flops.runs():
        cost = by_flops.by_label[run.condition].cost
        spent = run.steps * tokens_per_step * cost.training_flops_per_token
        assert spent <= flops < spent + tokens_per_step * cost.training_flops_per_token
        assert run.recipe.training.steps == run.steps
    by_time = expand(study(data, budget={"seconds": 6.0}))
    assert {r.condition: r.steps for r in by_time.runs({"hrm": 0.5, "plain": 0.25})} == {"hrm": 12, "plain": 24}


def test_a_budget_that_pays_for_nothing(data: Path) -> None:
    told = mistakes(data, budget={"tokens": 31})
    assert len(told) == 2
    assert "budget.tokens 31 does not pay for one step of 'hrm'" in told[0]


def test_all_mistakes_are_told_at_once(data: Path) -> None:
    told = mistakes(
        data,
        base=merged(settings(data)["base"], {"training": {"steps": 5, "seed": 1}, "optimiser": {"lr": 1}}),
        arms={
            "hrm": {"model": {**HRM, "n_cycels": 2}},
            "far": {"model": {"family": "transformer", **TINY, "n_layers": 1}, "match": {"to": 10}},
            "lost": {"model": {**HRM, "d_modle": 8}, "match": {"to": "nobody"}},
            "a": {"model": HRM, "match": {"to": "b"}},
            "b": {"model": HRM, "match": {"to": "a"}},
            "long": {"model": {**HRM, "context": 8}},
        },
        grid={"optimizer.learning_rate": [1], "training.seed": [1]},
        variants={"other text": {"data.window": 8}},
        baseline="hmr",
        evaluation={"window": 1000, "split": "valid"},
    )
    text = "\n".join(told)
    for part in (
        "base.training.steps: the study decides it; use budget",
        "base.training.seed: the study decides it; use seeds",
        "base.optimiser: unknown section, did you mean 'optimizer'?",
        "d_modle: unknown key, did you mean 'd_model'?",
        "n_cycels: unknown key, did you mean 'n_cycles'?",
        "arms.lost.match.to: unknown arm 'nobody'",
        "in a circle",
        "data.window 16 is longer than model.context 8",
        "grid: unknown factor 'optimizer.learning_rate'",
        "grid: training.seed is decided by seeds",
        "variants.other text: 'data.window' is not among model, optimizer, schedule",
        "baseline: unknown condition 'hmr'",
    ):
        assert part in text, f"{part} is not in\n{text}"


def test_mistakes_of_conditions_that_can_be_built(data: Path) -> None:
    told = mistakes(
        data,
        arms={
            "far": {"model": {"family": "transformer", **TINY, "n_layers": 1}, "match": {"to": 10}},
            "x": {"model": HRM},
        },
        evaluation={"window": 1000},
        published=[{"condition": "y", "value": 1, "what": "", "setting": "", "source": ""}],
    )
    assert len(told) == 3
    assert "far: no d_model gives parameters 10 within 1.00%; the closest is" in told[0]
    assert "published: unknown condition 'y'" in told[1]
    assert told[2] == "evaluation.window 1000 is longer than the context of x, 32"


def test_no_data_is_told_together_with_the_rest(tmp_path: Path) -> None:
    told = mistakes(tmp_path / "nowhere", baseline="x")
    assert any("base.data.path:" in mistake and "nowhere" in mistake for mistake in told)
    assert any("baseline" in mistake for mistake in told)
    assert "base.data.path is not set" in mistakes(None)[0]


def test_too_little_text_for_a_window(data: Path) -> None:
    arm = {"model": {**HRM, "context": 1 << 20}}
    base = merged(settings(data)["base"], {"data": {"window": 1 << 19}})
    assert any("too few for a window of 524288" in told for told in mistakes(data, base=base, arms={"a": arm}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": {}}, "one of steps, tokens, flops, seconds is needed, got none"),
        ({"budget": {"steps": 1, "tokens": 5}}, "got steps, tokens"),
        ({"budget": {"step": 1}}, "study.budget.step: unknown key, did you mean 'steps'?"),
        ({"seeds": []}, "at least one, and none twice"),
        (
            {"arms": {"a": {"model": {}, "match": {"to": -5}}}},
            "match.to: expected a number above 0, or the name of an arm",
        ),
        ({"arms": {"a": {"model": {}, "match": {"to": True}}}}, "match.to: expected a number above 0"),
        ({"seeds": 0}, "study.seeds: expected how many (1 to 1000), or a list of them such as [0, 1, 2] (got 0)"),
        ({"seeds": True}, "study.seeds: expected how many"),
        ({"seeds": [1, 1]}, "none twice"),
        ({"arms": {}}, "study.arms"),
        ({"arms": {"a, b": {"model": {}}}}, "study.arms"),
        ({"measure": ["gates"]}, "study.measure.0"),
        ({"sees": 3}, "study.sees: unknown key, did you mean 'seeds'?"),
        ({"grid": {"x": [1]}, "search": {"space": {}}}, "search and grid exclude each other"),
    ],
)
def test_what_no_study_may_say(changes: dict[str, Any], told: str, data: Path) -> None:
    with pytest.raises(UserError) as caught:
        study(data, **changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("search", "told"),
    [
        ({"engine": "grid", "space": {"optimizer.lr": {"low": 1, "high": 2}}}, "the engine grid needs a list"),
        ({"engine": "tpe", "space": {"optimizer.lr": {"low": 2, "high": 1}}}, "low must be a number below high"),
        ({"engine": "tpe", "space": {"optimizer.lr": {"low": math.nan, "high": 1}}}, "low must be a number below high"),
        ({"engine": "tpe", "space": {"optimizer.lr": {"low": 1, "high": math.inf}}}, "low must be a number below high"),
        ({"engine": "tpe", "space": {"optimizer.lr": [1e-3, math.nan]}}, "values must be finite"),
        ({"engine": "tpe", "space": {"optimizer.lr": {"low": 0, "high": 1, "log": True}}}, "low must be above 0"),
        (
            {"engine": "tpe", "space": {"optimizer.lr": {"low": 1, "high": 2, "log": "false"}}},
            "log must be true or false",
        ),
        ({"engine": "tpe", "space": {"optimizer.lr": 3}}, "expected a list of values or {low, high, log}"),
        ({"engine": "tpe", "space": {"optimizer.rate": [1]}}, "unknown factor 'optimizer.rate'"),
    ],
)
def test_bad_search_spaces(search: dict[str, Any], told: str, data: Path) -> None:
    assert any(told in mistake for mistake in mistakes(data, search=search))


def test_values_of_a_grid_that_would_have_one_label(data: Path) -> None:
    told = mistakes(data, grid={"optimizer.lr": [1.0000001e-3, 1.0000002e-3]})
    assert "grid.optimizer.lr: two of the values [0.0010000001, 0.0010000002] are the same in six digits" in told[0]


def test_grid_search_tries_all_combinations_for_every_arm(data: Path) -> None:
    space = {"optimizer": {"lr": [1e-3, 1e-2]}, "schedule.warmup": [1, 2]}
    expansion = expand(study(data, search={"space": space}))
    assert [c.label for c in expansion.conditions if c.arm == "hrm"] == [
        f"hrm, lr={lr}, warmup={warmup}" for lr in ("0.001", "0.01") for warmup in (1, 2)
    ]
    assert len(expansion.conditions) == 8


def test_overrides_and_scales(data: Path, tmp_path: Path) -> None:
    values = {**settings(data), "scales": {"big": {"seeds": 5, "arms": {"hrm": {"model": {"d_model": 64}}}}}}
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(values))
    assert load_study(str(file)).seeds == 3
    big = load_study(str(file), ["scale=big", "base.optimizer.lr=1e-4", "budget.tokens=640"])
    assert (big.seeds, big.arms["hrm"].model["d_model"], big.arms["hrm"].model["n_heads"]) == (5, 64, 2)
    assert (big.base["optimizer"]["lr"], big.budget.kind, big.budget.amount) == (1e-4, "tokens", 640)
    assert load_study(str(file), ["scale=big", "seeds=4"]).seeds == 4, "what is given wins over the scale"
    for override, told in (
        ("scale=huge", "unknown scale 'huge'"),
        ("sede=1", "unknown key, did you mean 'seeds'"),
        ("seeds", "is not of the form"),
        ("name.x=1", "name is a value, not a section"),
    ):
        with pytest.raises(UserError, match=told):
            load_study(str(file), [override])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_study(load_study(str(file), ["scale=big", "seeds=4"])))
    assert load_study(str(resolved)).seeds == 4, "a resolved study stands for itself"
    assert parse_study(resolved.read_text(), "x") == load_study(str(resolved))


def test_unknown_studies(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'equal-param'"):
        load_study("equal-parm")
    with pytest.raises(UserError, match="does not exist; shipped studies: ablation, "):
        load_study("studies/nothing.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match="is not a study"):
        load_study(str(tmp_path / "list.yaml"))
    (tmp_path / "twice.yaml").write_text("name: a\nname: b\n")
    with pytest.raises(UserError, match="'name' stands twice"):
        load_study(str(tmp_path / "twice.yaml"))


@pytest.mark.parametrize("scale", ["small", "published"])
@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_can_be_run(name: str, scale: str, data: Path) -> None:
    shipped = load_study(name, [f"scale={scale}", f"base.data.path={data}"])
    expansion = expand(shipped)
    assert shipped.name == name
    assert len(shipped.seed_list) >= ENOUGH or shipped.search is not None
    for condition in expansion.conditions:
        match = shipped.arms[condition.arm].match
        if match is not None and condition.variant is None:
            assert condition.matched is not None
    if scale == "published":
        assert {c.recipe.training.device for c in expansion.conditions} == {"cuda"}
        widths = {c.recipe.model["d_model"] for c in expansion.conditions}
        assert widths <= {2048, 4096, 7296}


def test_the_example_of_the_page_can_be_run(data: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/studies.md").read_text()
    lines = page.split("## The file\n\n")[1].split("\n\n")[0]
    (tmp_path / "s.yaml").write_text(textwrap.dedent(lines))
    expansion = expand(load_study(str(tmp_path / "s.yaml"), [f"base.data.path={data}"]))
    assert len(expansion.conditions) == 6
    assert expansion.study.baseline in expansion.by_label


def test_flat_and_merged() -> None:
    assert flat({"a": {"b": 1, "c.d": [2]}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}
    assert merged({"a": {"b": 1}, "budget": {"steps": 1}}, {"a": {"c": 2}, "budget": {"tokens": 3}}) == {
        "a": {"b": 1, "c": 2},
        "budget": {"tokens": 3},
    }


def test_study_is_strict() -> None:
    assert issubclass(Study, StrictConfig)
