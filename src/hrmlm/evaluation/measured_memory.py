"""Peak memory of a training step, measured in a process of its own: what this one holds would be in the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from hrmlm.data.batch import Batch
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, build_model
from hrmlm.training.recipe import Recipe
from hrmlm.training.trainer import Trainer

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back to the system at once, instead of staying resident
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""What makes the resident memory of a process follow what it holds, with the C library of GNU."""


def measure(recipe: Recipe) -> int:
    """Bytes at the peak of two training steps, measured in a new process.

    On a GPU what torch allocated at most; on the CPU the growth of the resident memory since a tiny model was trained
    in the same process, without pages of files (libraries are read when they are used).
    Raises: UserError where the process fails.
    """
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(recipe.to_dict()),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise UserError(f"the measured step failed: {last}")
    return int(child.stdout.splitlines()[-1])


def random_batches(recipe: Recipe, model: LanguageModel) -> list[Batch]:
    """Micro-batches of random tokens, all of them scored; more than two take no more memory than two."""
    shape = (recipe.training.batch_size, recipe.window + 1)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(min(recipe.training.accumulation, 2)):
        ids_BL = torch.randint(model.config.n_predicted, shape, generator=generator)
        batches.append(Batch(ids_BL[:, :-1].contiguous(), ids_BL[:, 1:].contiguous()))
    return batches


def _main() -> None:
    """The new process: recipe from standard input, bytes to standard output."""
    recipe = Recipe.parse(json.load(sys.stdin), "recipe")
    tiny = {"family": recipe.model["family"], "vocab_size": 64, "context": 128, "d_model": 64}
    _train(recipe.model_copy(update={"model": tiny, "data": recipe.data.model_copy(update={"window": None})}))
    device = torch.device(recipe.training.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _train(recipe)
        print(torch.cuda.max_memory_allocated(device))
    else:
        before = _resident("RssAnon")
        _train(recipe)
        print(_resident("VmHWM") - _resident("RssFile") - before)


def _train(recipe: Recipe) -> None:
    """Two steps; the second one is like all that follow."""
    model = build_model(recipe.model)
    trainer = Trainer(recipe, model, lambda start, stop: [])
    batches = random_batches(recipe, model)
    for step in (1, 2):
        trainer.step(step, batches)


def _resident(name: str) -> int:
    """VmHWM (most resident memory so far), RssAnon or RssFile (now) of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
    except OSError:
        raise UserError("the memory of a process can be measured on Linux only") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    _main()
