"""Train, study, run and deploy hierarchical recurrent language models.

model = hrmlm.build("hrm-lm-359m-nt36")           # or a mapping: {"family": "hrm_lm", "d_model": 256, …}
model = hrmlm.load("runs/demo/hrm-lm")            # a run directory or a checkpoint
logits_BLV = model(tokens_BL).logits
hrmlm.generate("runs/demo/hrm-lm", "The state of")[0].text
with hrmlm.Generator.load("runs/demo/hrm-lm") as generator: ...  # many times: see its help
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from hrmlm.data.tokenizer import Tokenizer
    from hrmlm.inference import Generator
    from hrmlm.inference.rows import Completion
    from hrmlm.models import LanguageModel

__all__ = ["Generator", "__version__", "build", "generate", "load", "load_tokenizer"]


def build(model: "str | Mapping[str, Any]") -> "LanguageModel":
    """A new model with fresh weights, drawn from torch's global generator.

    model: name of a preset or path of a recipe, or the settings of a family ({"family": …, …}).

    Raises: UserError for an unknown name, key or value.
    """
    from hrmlm.models import build_model
    from hrmlm.training.recipe import load_recipe

    return build_model(load_recipe(model).model if isinstance(model, str) else model)


def load(path: "str | Path") -> "LanguageModel":
    """The trained model of a checkpoint, or of a run directory (its best checkpoint), in evaluation mode, on the CPU.

    Raises: UserError if there is none, or it is damaged or foreign.
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.training.run import resolve_checkpoint

    return load_model(resolve_checkpoint(path))


def load_tokenizer(path: "str | Path") -> "Tokenizer":
    """The tokenizer of a checkpoint or run directory. Raises: UserError as `load`."""
    from hrmlm import checkpoint
    from hrmlm.training.run import resolve_checkpoint

    return checkpoint.load_tokenizer(resolve_checkpoint(path))


def generate(path: "str | Path", prompts: "str | Sequence[str]", **options: Any) -> "list[Completion]":
    """Continue prompts with the model of a checkpoint or run directory.

    options: those of `hrmlm.inference.rows.GenerationOptions` (max_new_tokens, temperature, top_k, top_p,
    seed, stop, …).

    To generate more than once, or as a stream, use `hrmlm.Generator`.

    Raises: UserError as `load`, and for options or prompts that cannot be served.
    """
    from hrmlm.inference import Generator

    with Generator.load(path) as generator:
        return generator.generate(prompts, **options)


def __getattr__(name: str) -> Any:
    """`hrmlm.Generator`, imported when it is used: `import hrmlm` alone stays light."""
    if name != "Generator":
        raise AttributeError(f"module 'hrmlm' has no attribute {name!r}")
    from hrmlm.inference import Generator

    return Generator
