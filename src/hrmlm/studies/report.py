"""The report of a study: summary, tables with intervals, curves, published figures beside ours, and provenance."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hrmlm.files import write_atomic
from hrmlm.studies import figures
from hrmlm.studies.collect import ConditionResults, Findings, loss_of
from hrmlm.studies.document import Code, Figure, Fold, Heading, Items, Part, Table, Text, html, markdown
from hrmlm.studies.plan import duration
from hrmlm.studies.spec import flat
from hrmlm.studies.statistics import ENOUGH, Summary, paired, summarize
from hrmlm.studies.words import number, signed

Number = Callable[[Mapping[str, Any]], float | None]


def write(findings: Findings, directory: Path) -> list[Path]:
    """Write report.html, report.md and the pictures of the latter; return the paths of the two. Raises: UserError."""
    parts = build(findings)
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for part in parts:
        if isinstance(part, Figure):
            write_atomic(directory / "figures" / f"{part.name}.svg", figures.standalone(part.svg))
    paths = [directory / "report.html", directory / "report.md"]
    write_atomic(paths[0], html(findings.study.title, parts))
    write_atomic(paths[1], markdown(findings.study.title, parts))
    return paths


def build(findings: Findings) -> list[Part]:
    """The parts of the report."""
    parts: list[Part] = [Text(findings.study.question)] if findings.study.question else []
    parts.append(Items(findings.summary()))
    if any(result["steps"] for result in findings.every_result()):
        parts += _losses(findings)
        parts += _differences(findings)
        parts += _curves(findings)
    parts += _latency(findings)
    parts += _roles(findings)
    parts += _published(findings)
    parts += _fairness(findings)
    parts += _failures(findings)
    parts += _provenance(findings)
    return parts


def _losses(findings: Findings) -> list[Part]:
    rows = []
    for c in findings.conditions:
        planned = c.planned
        rows.append(
            [
                c.label,
                _count(planned.get("parameters")),
                _flops(planned.get("forward_flops_per_token")),
                _count(_first(c, "steps")),
                "pruned" if c.pruned else number(c.loss),
                number(c.summary(lambda r: r.get("bits_per_byte"))),
                str(0 if c.loss is None else c.loss.n),
                _time(c.summary(lambda r: r.get("training_seconds"))),
            ]
        )
    columns = ("condition", "parameters", "FLOPs/token", "steps", "nats/token", "bits/byte", "n", "training time")
    caption = (
        f"Loss of the final weights on the split {findings.study.evaluation.split}: mean over n seeds ± half of the "
        "95 % interval (Student's t). FLOPs of the forward pass. Training time: mean, without evaluation."
    )
    return [Heading("Results"), Table(columns, rows, caption)]


def _differences(findings: Findings) -> list[Part]:
    differences = findings.differences()
    if not differences:
        return []
    rows = [[label, signed(d), _interval(d), str(d.n)] for label, d in differences.items()]
    caption = (
        f"Loss minus that of {findings.baseline}, seed by seed (same data order), in nats per token; below zero is "
        "better. The interval is that of the mean difference."
    )
    if any(d.n < ENOUGH for d in differences.values()):
        caption += f" With fewer than {ENOUGH} pairs it says little, whether it excludes zero or not."
    return [Heading("Paired differences"), Table(("condition", "difference", "95 % interval", "pairs"), rows, caption)]


def _interval(summary: Summary) -> str:
    return "–" if summary.low is None else f"{summary.low:+.3f} to {summary.high:+.3f}"


def _curves(findings: Findings) -> list[Part]:
    parts: list[Part] = []
    for axis, name in figures.AXES.items():
        svg = figures.curves(findings, axis)
        if svg is not None:
            caption = f"Validation loss during training against {name}: mean over seeds, band from lowest to highest."
            parts.append(Figure(f"loss-{axis}", svg, caption))
    return [Heading("Curves"), *parts] if parts else []


def _latency(findings: Findings) -> list[Part]:
    def of(key: str, scale: float = 1.0) -> Number:
        def value(result: Mapping[str, Any]) -> float | None:
            found = (result["measures"].get("latency") or {}).get(key)
            return None if found is None else scale * found

        return value

    measured = [c for c in findings.conditions if c.summary(of("cached_ms")) is not None]
    if not measured:
        return []
    names = ("parameters", "without cache ms", "cached ms", "weights MB", "cache MB", "forward MB", "process MB", "n")
    keys = (("recompute_ms", 1.0), ("cached_ms", 1.0), ("weight_bytes", 1e-6), ("kv_cache_bytes", 1e-6))
    rows = []
    for c in measured:
        cells = [number(c.summary(of(key, scale)), 2) for key, scale in keys]
        cells.append(number(c.summary(of("forward_peak_bytes", 1e-6)), 1))
        cells.append(number(c.summary(lambda r: 1e-6 * r["peak_process_bytes"]), 0))
        rows.append([c.label, _count(c.planned.get("parameters")), *cells, str(len(c.numbers(of("cached_ms"))))])
    first = next(iter(measured[0].results.values()))["measures"]["latency"]
    spreads = [value for c in measured for value in c.numbers(of("cached_spread")).values()]
    caption = (
        f"One token more after {first['length'] - 1} others, batch 1, {first['precision']} on {first['device']}, "
        f"{first['threads']} thread(s); each number is a median of {first['rounds']} interleaved rounds after a "
        f"warm-up, its mean over the runs ± 95 % interval; largest spread within a run {max(spreads):.0%}. Weights and "
        "cache are counted. Forward MB: the most that a forward pass needs beside the weights (GPUs only). Process MB: "
        "the most that the whole process ever had, libraries and evaluation included."
    )
    points = [
        (series, [(c.label, c.planned["parameters"], _mean(c.summary(of(key)))) for c in measured])
        for series, key in (("without cache", "recompute_ms"), ("with cache", "cached_ms"))
    ]
    svg = figures.against(findings, "latency", points, "milliseconds per token")
    table = Table(("condition", *names), rows, caption)
    return [Heading("Latency and memory"), table, Figure("latency", svg, "Latency against parameters.")]


def _mean(summary: Summary | None) -> float:
    assert summary is not None
    return summary.mean


def _roles(findings: Findings) -> list[Part]:
    parts: list[Part] = []
    tokens = 0
    for c in findings.conditions:
        found = [r["measures"]["roles"] for r in c.results.values() if r["measures"].get("roles")]
        if not found:
            continue
        tokens = found[0]["tokens"]
        parts.append(
            Table(
                ("", "nats/token", "more than as trained", "n"),
                _loss_rows(c, found[0]),
                f"{c.label}: loss with a module frozen, and read out at other depths.",
            )
        )
        rows = []
        for index, application in enumerate(found[0]["applications"]):
            cells = [
                number(c.summary(_application(index, key))) for key in ("gate", "gate_on_zero_input", "rms", "change")
            ]
            rows.append([application["name"], *cells])
        columns = ("application", "gate on text", "gate on zero input", "state RMS", "relative change")
        parts.append(Table(columns, rows, f"{c.label}: each application of a module, mean over seeds and positions."))
    if not parts:
        return []
    note = (
        "Frozen: the module leaves the state that it updates as it is, at inference only; differences are paired by "
        "seed. Read at depth d: the prediction after d cycles or steps instead of all. The gate is the share of the "
        "old state that is kept. Zero input: every token is embedded as zero. Relative change: norm of the change over "
        f"norm of the state before it. All of it on the first {tokens:,} tokens of the split, so the loss as trained "
        "differs a little from the one above."
    )
    return [Heading("Roles"), Text(note), *parts]


def _application(index: int, key: str) -> Number:
    def value(result: Mapping[str, Any]) -> float | None:
        roles = result["measures"].get("roles")
        return roles["applications"][index][key] if roles else None

    return value


def _loss_rows(condition: ConditionResults, example: Mapping[str, Any]) -> list[list[str]]:
    def losses(*path: str) -> dict[int, float]:
        def value(result: Mapping[str, Any]) -> float | None:
            inner: Any = result["measures"].get("roles")
            for part in path if inner else ():
                inner = inner[part]
            return inner or None

        return condition.numbers(value)

    def row(name: str, *path: str) -> list[str]:
        found = losses(*path)
        more = paired(found, losses("loss")) if path != ("loss",) else None
        return [name, number(summarize(list(found.values()))), "" if more is None else signed(more), str(len(found))]

    rows = [row("as trained", "loss")]
    rows += [row(f"{module} frozen", "loss_frozen", module) for module in example["loss_frozen"]]
    return rows + [row(f"read at depth {depth}", "loss_at_depth", depth) for depth in example["loss_at_depth"]]


def _published(findings: Findings) -> list[Part]:
    if not findings.study.published:
        return []
    rows = []
    for item in findings.study.published:
        exact = [c for c in findings.conditions if c.label == item.condition]
        of_arm = [c for c in findings.conditions if c.arm == item.condition and c.loss is not None]
        best = findings.best_by_arm().get(item.condition)
        c = exact[0] if exact else best
        chosen = f" (best of {len(of_arm)} finished settings)" if not exact and len(of_arm) > 1 else ""
        rows.append(
            [
                item.what,
                "–" if c is None else number(c.loss),
                "–" if c is None else _setting(c) + chosen,
                f"{item.value:g}",
                f"{item.setting}; {item.source}",
            ]
        )
    columns = ("figure", "ours", "our setting", "published", "published setting")
    note = (
        "Nats per token of different texts, tokenizers and scales cannot be compared with each other; what can "
        "be compared is which of two models is better, within one column."
    )
    return [Heading("Beside the published figures"), Text(note), Table(columns, rows)]


def _setting(c: ConditionResults) -> str:
    if not c.results:
        return "not finished"
    result = next(iter(c.results.values()))
    evaluation, data = result["evaluation"], Path(str(result["evaluation"]["data_path"])).name
    recipe = result["recipe"]
    return (
        f"{c.label}: D = {recipe['model']['d_model']}, {result['cost']['parameters']:,} parameters, "
        f"{result['tokens']:,} tokens in {result['steps']:,} steps at a peak rate of {recipe['optimizer']['lr']:g}, "
        f"{data} (vocabulary {recipe['model']['vocab_size']:,}), split {evaluation['split']}, window "
        f"{evaluation['window']}, {len(c.results)} seed(s)"
    )


def _fairness(findings: Findings) -> list[Part]:
    study = findings.study
    results = findings.every_result()
    sentences = [
        f"Budget: {study.budget.told} for every run.",
        f"Evaluation: the final weights on the split {study.evaluation.split}, with the same windows for all.",
        _data_order(findings),
        _rates(findings),
    ]
    matched = {c.arm: c.planned["matched"] for c in findings.conditions if c.planned.get("matched")}
    sentences += [f"The width of {arm} was solved for: {what}." for arm, what in matched.items()]
    if len({result["code"] for result in results}) > 1:
        sentences.append("The runs were made by different states of the code: see the fingerprints below.")
    if len({(r["threads"], r["evaluation"]["device"]) for r in results}) > 1:
        sentences.append("The runs had different devices or numbers of threads: compare no times.")
    if findings.plan.get("jobs", 1) > 1:
        sentences.append(f"{findings.plan['jobs']} runs shared the machine at a time: times are longer than alone.")
    parts: list[Part] = [Heading("What is the same for all"), Items([sentence for sentence in sentences if sentence])]
    if shared := _shared_settings(findings):
        parts.append(Fold("Settings that all runs share", [Table(("setting", "value"), shared)]))
    return parts


def _shared_settings(findings: Findings) -> list[list[str]]:
    """Settings of the recipes that are equal in all runs."""
    recipes = [
        flat({key: result["recipe"][key] for key in ("training", "optimizer", "schedule")})
        for result in findings.every_result()
        if result["steps"]
    ]
    if not recipes:
        return []
    equal = {key: value for key, value in recipes[0].items() if all(other.get(key) == value for other in recipes)}
    if equal.get("schedule.warmup", 0) is None:
        equal["schedule.warmup"] = "what the family asks for, or schedule.warmup_fraction of a shorter run"
    return [[key, "–" if value is None else str(value)] for key, value in equal.items()]


def _data_order(findings: Findings) -> str:
    keys = ("batch_size", "accumulation")
    orders = {
        (*(r["recipe"]["training"][k] for k in keys), r["evaluation"]["window"], r["evaluation"]["data"])
        for r in findings.every_result()
    }
    if len(orders) <= 1:
        return "Runs of one seed read the same text in the same order."
    return "The runs differ in batch size, window or data, and so in the order of the text: pairs share only the seed."


def _rates(findings: Findings) -> str:
    rates: dict[float, list[str]] = {}
    for c in findings.conditions:
        found = [r["recipe"]["optimizer"]["lr"] for r in c.results.values() if "recipe" in r]
        for rate in found[:1] or ([c.planned["lr"]] if c.planned.get("lr") and not findings.study.search else []):
            rates.setdefault(rate, []).append(c.label)
    if not rates:
        return ""
    if len(rates) == 1:
        return f"Peak learning rate {next(iter(rates)):g} for all; it was not tuned for each of them."
    return "Peak learning rates: " + "; ".join(f"{lr:g} for {', '.join(labels)}" for lr, labels in rates.items()) + "."


def _failures(findings: Findings) -> list[Part]:
    rows = [[c.label, str(seed), message] for c in findings.conditions for seed, message in c.failed.items()]
    if not rows:
        return []
    return [Heading("Failed runs"), Table(("condition", "seed", "error"), rows)]


def _provenance(findings: Findings) -> list[Part]:
    results = findings.every_result()
    parts: list[Part] = [Heading("How to repeat it")]
    file = shlex.quote(str(findings.path / "study.yaml"))
    lines = [f"hrmlm study run {file} --out runs/again", "hrmlm study report runs/again"]
    if results and (commands := _commands(findings, results[0])):
        lines += ["", "# one run, and its evaluation:", *commands]
    parts.append(Code("\n".join(lines)))
    parts.append(
        Text(
            "Paths are those of the directory in which the study was run; anywhere else give base.data.path=DIR to the "
            "first command, and data.path=DIR to the training."
        )
    )
    parts += _data(findings)
    if results:
        facts = [[name, ", ".join(sorted({str(of(r)) for r in results}))] for name, of in _FACTS.items()]
        parts.append(Table(("", "value"), facts, "Of all runs; several values where they differ."))
        evaluation = results[0]["evaluation"]
        parts.append(Text(f"How text is scored: {evaluation['rule']}."))
    if findings.other_runs:
        parts.append(Text(f"{findings.other_runs} runs of earlier versions of the study lie beside these, left out."))
    rows = [
        [c.label, str(seed), "–" if loss_of(result) is None else f"{loss_of(result):.4f}", str(result["id"])]
        for c in findings.conditions
        for seed, result in c.results.items()
    ]
    parts.append(Fold("Every run", [Table(("condition", "seed", "nats/token", "run"), rows)]))
    parts.append(
        Fold("The study with its overrides", [Code(yaml.safe_dump(findings.study.to_dict(), sort_keys=False))])
    )
    return parts


def _data(findings: Findings) -> list[Part]:
    """Where the text came from, as its meta.json said when the study was started."""
    facts = findings.plan.get("corpus")
    if not isinstance(facts, dict):
        return []
    splits = ", ".join(f"{name} {tokens:,}" for name, tokens in facts["tokens"].items())
    sources = ", ".join(f"{source['source']} ({source['split'] or 'divided'})" for source in facts["sources"])
    told = (
        f"Data {facts['path']}: {facts['tokenizer']} of {facts['vocab_size']:,} ids, tokens: {splits}; from {sources}."
    )
    parts: list[Part] = [Text(told)]
    if findings.study.prepare:
        parts.append(Code(findings.study.prepare))
    return parts


def _commands(findings: Findings, result: Mapping[str, Any]) -> list[str]:
    evaluation, folder = result["evaluation"], findings.path / "runs" / result["id"]
    if not result["steps"]:
        return []
    checkpoint = f"runs/one/checkpoints/{Path(evaluation['checkpoint']).name}"
    data, first = shlex.quote(str(evaluation["data_path"])), evaluation["first_tokens"]
    return [
        f"hrmlm train {shlex.quote(str(folder / 'train' / 'recipe.yaml'))} --out runs/one",
        f"hrmlm evaluate {checkpoint} --data {data} --split {evaluation['split']} --window {evaluation['window']} "
        f"--stride {evaluation['stride']} --batch-size {evaluation['batch_size']}"
        + ("" if first is None else f" --tokens {first}"),
    ]


_FACTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "data (fingerprint)": lambda r: r["evaluation"]["data"],
    "tokenizer (fingerprint)": lambda r: r["evaluation"]["tokenizer"],
    "tokens scored": lambda r: f"{r['evaluation']['tokens']:,}",
    "seeds": lambda r: r["seed"],
    "device": lambda r: r["evaluation"]["device"],
    "precision of training": lambda r: r["recipe"]["training"]["precision"],
    "precision of evaluation": lambda r: r["evaluation"]["precision"],
    "threads": lambda r: r["threads"],
    "hrmlm": lambda r: r["hrmlm"],
    "code (fingerprint)": lambda r: r["code"],
    "torch": lambda r: r["torch"],
    "Python": lambda r: r["python"],
}


def _first(c: ConditionResults, key: str) -> Any:
    return next((result[key] for result in c.results.values()), c.planned.get(key))


def _count(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


def _flops(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _time(summary: Summary | None) -> str:
    return "–" if summary is None else duration(summary.mean)
