"""One run of a study in a process of its own: train, evaluate, measure, write the result.

Started by `hrmlm.studies.runner` as `python -m hrmlm.studies.worker DIR RUN TOKEN`. The process holds the claim of its
run and keeps it alive. It may be killed at any moment; whoever runs the study next goes on from the last checkpoint.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hrmlm
from hrmlm.checkpoint import load_model
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost
from hrmlm.evaluation.loss import evaluate_data
from hrmlm.files import read_json, write_json
from hrmlm.models import LanguageModel, build_model
from hrmlm.studies import measures
from hrmlm.studies.claims import BEAT_SECONDS, Claims
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.expand import Run
from hrmlm.studies.search import Pruned, reporter_for
from hrmlm.training.metrics import read_metrics
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train

LOOK_SECONDS = 0.5
DONE, FAILED, STOPPED, BUSY = 0, 1, 4, 5
"""Exit codes: finished; failed, with an error.json; stopped by a signal and saved; somebody else works on it."""


def main(directory: str, run_id: str, token: str) -> int:
    """Do the run; return the exit code."""
    place = StudyDirectory(directory)
    claims = place.claims
    if not claims.adopt(run_id, token):
        return BUSY
    over = threading.Event()
    alive = threading.Thread(target=_keep_alive, args=(claims, run_id, token, os.getppid(), over), daemon=True)
    alive.start()
    try:
        run = Run.of(read_json(place.folder(run_id) / "run.json"))
        return _work(place, run)
    except (Exception, SystemExit) as error:
        _fail(place, run_id, error)
        return FAILED
    finally:
        over.set()
        alive.join()
        claims.release(run_id, token)


def _keep_alive(claims: Claims, name: str, token: str, parent: int, over: threading.Event) -> None:
    """Touch the claim; stop the run when the process that started it is gone, or somebody else has taken it over."""
    beat, told = time.monotonic(), False
    while not over.wait(LOOK_SECONDS):
        if os.getppid() != parent and not told:
            told = True
            os.kill(os.getpid(), signal.SIGTERM)  # training ends after the current step, saved
        if time.monotonic() - beat >= BEAT_SECONDS:
            beat = time.monotonic()
            if not claims.beat(name, token):
                os._exit(BUSY)  # at once: what we would write now belongs to somebody else


def _work(place: StudyDirectory, run: Run) -> int:
    directory = place.folder(run.id) / "train"
    trained: dict[str, Any] | None = None
    if run.steps:
        if _is_busy(directory):
            return BUSY
        try:
            result = train(run.recipe, directory, resume=directory.exists(), reporter=reporter_for(place, run))
        except Pruned as pruned:
            facts = {**_facts(run), "pruned": str(pruned), "measures": dict.fromkeys(run.measure)}
            write_json(place.folder(run.id) / "result.json", facts)
            return DONE
        if result.stopped_by:
            return STOPPED
        trained = {**asdict(result), "out": "train"}
        model = load_model(RunDirectory(directory).newest())
    else:
        torch.manual_seed(run.seed)
        model = build_model(run.recipe.model)
    model.to(run.recipe.training.device).eval()
    write_json(place.folder(run.id) / "result.json", _result(place, run, model, trained))
    return DONE


def _is_busy(directory: Path) -> bool:
    """Whether a process that lost its claim, having been frozen for long, still holds the run directory."""
    if not directory.exists():
        return False
    trial = RunDirectory(directory)
    try:
        trial.lock()
    except UserError:
        return True
    finally:
        trial.close()
    return False


def _facts(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "condition": run.condition,
        "arm": run.arm,
        "seed": run.seed,
        "steps": run.steps,
        "trial": run.trial,
        "hrmlm": hrmlm.__version__,
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
    }


def _result(place: StudyDirectory, run: Run, model: LanguageModel, trained: dict[str, Any] | None) -> dict[str, Any]:
    """Everything that is known of a finished run; with its checkpoint, enough to get the same numbers again."""
    settings = run.evaluation
    data = PreparedData.open(run.recipe.data.path or "")
    window = settings["window"] or run.recipe.window
    path = place.folder(run.id) / "train" / "metrics.jsonl"
    steps = [line for line in read_metrics(path) if line["event"] == "step"] if run.steps else []
    costs = cost(model, run.recipe.window)
    tokens = steps[-1]["tokens"] if steps else 0
    report = evaluate_data(
        model,
        data,
        settings["split"],
        window=window,
        stride=settings["stride"],
        batch_size=settings["batch_size"],
        first_tokens=settings["tokens"],
        data_path=run.recipe.data.path,
        checkpoint=f"runs/{run.id}/train/checkpoints/{RunDirectory(path.parent).checkpoint_path(run.steps).name}",
    )
    found: dict[str, Any] = {}
    if "roles" in run.measure:
        found["roles"] = measures.roles(model, data, settings["split"], window, settings["batch_size"])
    if "latency" in run.measure:
        found["latency"] = measures.latency(model, window)
    return {
        **_facts(run),
        "loss": report.nats_per_token,
        "bits_per_byte": report.bits_per_byte,
        "perplexity": report.perplexity,
        "tokens": tokens,
        "training_flops": tokens * costs.training_flops_per_token,
        "training_seconds": training_seconds(steps),
        "batches_without_targets": steps[-1]["batches_without_targets"] if steps else 0,
        "peak_process_bytes": measures.peak_process_bytes(),
        "training": trained,
        "cost": costs.to_dict(),
        "evaluation": report.to_dict(),
        "recipe": run.recipe.to_dict(),
        "measures": found,
    }


def training_seconds(steps: list[dict[str, Any]]) -> float:
    """Seconds spent in training steps, from the lines of a record; evaluating and saving are not in it."""
    before, seconds = 0, 0.0
    for line in steps:
        if line.get("tokens_per_second"):
            seconds += (line["tokens"] - before) / line["tokens_per_second"]
        before = line["tokens"]
    return seconds


@cache
def code_fingerprint() -> str:
    """Of the sources of this package: runs of one study should have been made by one code."""
    root = Path(hrmlm.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _fail(place: StudyDirectory, run_id: str, error: BaseException) -> None:
    lines = traceback.format_exception(error)
    message = " ".join(str(error).split()) or type(error).__name__
    write_error(place, run_id, type(error).__name__, message, "".join(lines)[-4000:])


def write_error(place: StudyDirectory, run_id: str, kind: str, message: str, trace: str = "") -> None:
    """Mark a run as failed."""
    error = {"id": run_id, "error": kind, "message": message, "traceback": trace, "code": code_fingerprint()}
    write_json(place.folder(run_id) / "error.json", json.loads(json.dumps(error)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
