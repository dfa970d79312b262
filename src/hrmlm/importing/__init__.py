"""Weights released by others, made into checkpoints of this library.

A module of this package, named after the format it reads, says which tensor of ours is made of which published ones
(`settings`, `sources`, `TIES`); what is generic stands here: reading, comparing names and shapes, writing. Files that
run code when they are read (pickles) are refused unread.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hrmlm.checkpoint import named_tensors, read_tensors, save_checkpoint
from hrmlm.config import nearest
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.files import read_json, refuse_existing
from hrmlm.models import LanguageModel, build_model, model_config


@dataclass(frozen=True)
class Source:
    """Where one of our tensors comes from.

    parts: published names with the shapes they must have; combine: makes our tensor of them, given in that order.
    """

    parts: Mapping[str, tuple[int, ...]]
    combine: Callable[..., Tensor] = lambda tensor: tensor


def formats() -> list[str]:
    """Names of the published formats that can be read."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def import_weights(
    format_name: str, weights: str | Path, config: str | Path, out: str | Path, tokenizer: str | Path | None = None
) -> LanguageModel:
    """Write released weights as a checkpoint that `hrmlm.load` reads; return the model, in evaluation mode.

    format_name: one of `formats()`; weights: a .safetensors file; config: the JSON file published beside it; out: the
    checkpoint's directory; tokenizer: a tokenizer.json to store with it (ids it does not have are then never
    predicted).

    Raises: UserError for an unknown format, a pickle, a configuration that cannot be expressed, and in one line for all
    tensors that are missing, unknown, of another shape or kind, not tied as they must be, or not finite.
    """
    if format_name not in formats():
        raise UserError(f"unknown format {format_name!r}, {nearest(format_name, formats())}")
    translator = importlib.import_module(f"{__name__}.{format_name}")
    refuse_existing(out)
    settings = translator.settings(_read_config(Path(config)), str(config))
    words = None if tokenizer is None else Tokenizer.load(tokenizer)
    model_settings = model_config(settings, where=str(config))
    if words is not None:
        if words.vocab_size > settings["vocab_size"]:
            raise UserError(f"{tokenizer} has {words.vocab_size} ids and the model only {settings['vocab_size']}")
        model_settings = model_settings.replace(used_vocab=words.vocab_size)
    model = build_model(model_settings)
    model.schedule()  # more steps than can be unrolled are refused now, not when the checkpoint is used
    _fill(model, translator, Path(weights))
    save_checkpoint(out, model, tokenizer=words)
    return model.eval()


def _read_config(file: Path) -> Mapping[str, Any]:
    """The published configuration, also where a file keeps it under "config"."""
    settings = read_json(file)
    if isinstance(settings, dict) and isinstance(settings.get("config"), dict):
        settings = settings["config"]
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds no configuration: expected a mapping of keys to values")
    return settings


def _fill(model: LanguageModel, translator: ModuleType, file: Path) -> None:
    """Copy published tensors into the model. Raises: UserError naming everything that does not fit."""
    if file.suffix != ".safetensors":
        raise UserError(
            f"{file} is not a .safetensors file; other formats (.pt, .bin) are pickles, which run code when they are "
            "read, and are refused: convert it where you trust it, with safetensors.torch.save_file"
        )
    stored = read_tensors(file)
    sources: dict[str, Source] = translator.sources(model.config)
    targets = named_tensors(model)
    assert sources.keys() == targets.keys()
    shapes = {name: shape for source in sources.values() for name, shape in source.parts.items()}
    if problems := _problems(stored, shapes, translator.TIES):
        raise UserError(f"{file} does not fit its configuration: {'; '.join(problems)}")
    with torch.no_grad():
        for name, source in sources.items():
            targets[name].copy_(source.combine(*(stored[part] for part in source.parts)))


def _problems(stored: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], ties: dict[str, str]) -> list[str]:
    problems = [f"missing {name}" for name in shapes if name not in stored]
    for name, tensor in stored.items():
        if name in ties:
            tied = stored.get(ties[name])
            if tied is not None and not torch.equal(tensor, tied):
                problems.append(f"{name} differs from {ties[name]}, to which the model ties it")
        elif name not in shapes:
            problems.append(f"unknown {name}")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} where {shapes[name]} is needed")
        elif not tensor.is_floating_point():  # quantised weights mean nothing without their scales
            problems.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')} where floating point is needed")
        elif not tensor.float().isfinite().all():
            problems.append(f"{name} is not finite")
    return problems
