"""Checkpoints: a directory that is complete or absent, holding safetensors and JSON, nothing that runs code.

checkpoint.json        what it is: model configuration, provenance, training position, size and hash of each file
model.safetensors      every weight once, under the model's own names
tokenizer.json         the tokenizer the model was trained with
optimizer.safetensors  optimizer state, if training can go on from here
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import hrmlm
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.files import atomic_directory, read_json, write_json
from hrmlm.models import LanguageModel, build_model, model_config

FORMAT = 1
MANIFEST = "checkpoint.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


class NotFiniteError(RuntimeError):
    """Weights or optimizer state hold NaN or infinity: such a state is never written as a checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not finite; no checkpoint is written")
        self.name = name


class NewerFormatError(UserError):
    """A checkpoint of a format that this version does not read: nothing is wrong with it."""


@dataclass
class Checkpoint:
    """What a checkpoint directory says about itself. training: position and recipe, None for weights only."""

    path: Path
    model: dict[str, Any]
    training: dict[str, Any] | None = None
    data_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    version: str = hrmlm.__version__
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps done, 0 for weights without a training record."""
        return int((self.training or {}).get("step", 0))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, each storage once: what several names share is listed under the first."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())  # skips repeated parameters
    saved = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in saved})
    return tensors


def save_checkpoint(
    path: str | Path,
    model: LanguageModel,
    *,
    tokenizer: Tokenizer | None = None,
    optimizer_state: Mapping[str, Tensor] | None = None,
    training: Mapping[str, Any] | None = None,
    data_fingerprint: str | None = None,
) -> None:
    """Write a checkpoint that appears under `path` only when it is complete and readable.

    Raises: NotFiniteError for a state with NaN or infinity; UserError if `path` exists; OSError if the disk refuses.
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors(model).items()}
    states = {name: tensor.detach().cpu().contiguous() for name, tensor in (optimizer_state or {}).items()}
    for name, tensor in [*weights.items(), *states.items()]:
        if not torch.isfinite(tensor).all():
            raise NotFiniteError(name)
    with atomic_directory(path) as directory:
        _write_tensors(weights, directory / WEIGHTS)
        if optimizer_state is not None:
            _write_tensors(states, directory / OPTIMIZER)
        if tokenizer is not None:
            tokenizer.save(directory)
        manifest = {
            "format": FORMAT,
            "version": hrmlm.__version__,
            "model": model.config.model_dump(mode="json"),
            "trained_depth": model.trained_depth,
            "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
            "data_fingerprint": data_fingerprint,
            "training": dict(training) if training is not None else None,
            "files": {file.name: _describe(file) for file in sorted(directory.iterdir())},
        }
        write_manifest(directory, manifest)
        with safe_open(directory / WEIGHTS, framework="pt") as stored:  # a file that cannot be read back is no save
            assert set(stored.keys()) == set(weights)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write checkpoint.json, sealed with a hash over all of its values."""
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    write_json(directory / MANIFEST, {**values, "sha256": _seal(values)})


def _seal(manifest: Mapping[str, Any]) -> str:
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(f"{file} cannot be written: {error}") from None


def _describe(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read and verify what a checkpoint directory says about itself. Nothing but JSON is parsed here.

    Raises: UserError if it is missing, foreign, newer than this version understands, truncated or altered.
    """
    path = Path(path)
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        what = (
            "is not a directory" if path.is_file() else "does not exist" if not path.exists() else f"has no {MANIFEST}"
        )
        raise UserError(f"{path} {what}: not a checkpoint of hrmlm (a directory written by `hrmlm train`)")
    manifest = read_json(manifest_path)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise UserError(f"{manifest_path} does not describe a checkpoint of hrmlm")
    if manifest["format"] != FORMAT:
        raise NewerFormatError(
            f"{path} has checkpoint format {manifest['format']} and this version reads {FORMAT}; "
            f"it was written by hrmlm {manifest.get('version')}"
        )
    if not _is_complete(manifest):
        raise UserError(f"{manifest_path} does not describe a checkpoint of hrmlm")
    if manifest.get("sha256") != _seal(manifest):
        raise UserError(f"{manifest_path} is damaged: it was changed after it was written")
    for name, expected in manifest["files"].items():
        file = path / Path(name).name
        if not file.is_file():
            raise UserError(f"{path} is incomplete: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise UserError(
                f"{file} is damaged: {file.stat().st_size} bytes where {expected['bytes']} were written; "
                "use another checkpoint of the run"
            )
        if _describe(file)["sha256"] != expected["sha256"]:
            raise UserError(f"{file} is damaged: its contents changed after it was written")
    return Checkpoint(
        path,
        manifest["model"],
        manifest.get("training"),
        manifest.get("data_fingerprint"),
        manifest.get("tokenizer_fingerprint"),
        manifest.get("version", ""),
        manifest["files"],
    )


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether the parts of a manifest that are used without a further check are there and of the right kind."""
    files, training = manifest.get("files"), manifest.get("training")
    return (
        isinstance(manifest.get("model"), dict)
        and isinstance(training, dict | None)
        and (training is None or ({"step", "recipe"} <= training.keys() and _is_count(training["step"])))
        and isinstance(files, dict)
        and WEIGHTS in files
        and all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values())
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises: UserError if it is not one."""
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}") from None


def load_weights(model: nn.Module, file: Path) -> None:
    """Copy the weights of a file into a model.

    A name that the model ties to another one may be absent, or be there with the same values.

    Raises: UserError naming every tensor that is missing, unknown, of another shape, or at odds with its tie.
    """
    stored, expected = read_tensors(file), named_tensors(model)
    problems = [f"missing {name}" for name in expected if name not in stored]
    ties = _ties(model)
    for name, tensor in stored.items():
        target = expected.get(name)
        if name in ties:
            if ties[name] in stored and not torch.equal(tensor, stored[ties[name]]):
                problems.append(f"{name} differs from {ties[name]}, to which the model ties it")
        elif target is None:
            problems.append(f"unknown {name}")
        elif target.shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)} where the model needs {tuple(target.shape)}")
    if problems:
        raise UserError(f"{file} does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, target in expected.items():
            target.copy_(stored[name])


def _ties(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, each with the name its weights are saved under."""
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def load_model(checkpoint: Checkpoint) -> LanguageModel:
    """The model of a checkpoint, on the CPU, in evaluation mode. Raises: UserError."""
    config = model_config(checkpoint.model, where=f"{checkpoint.path / MANIFEST}: model")
    model = build_model(config)
    load_weights(model, checkpoint.path / WEIGHTS)
    return model.eval()


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises: UserError if it has none, or one that does not fit the manifest."""
    if not (checkpoint.path / "tokenizer.json").is_file():
        raise UserError(f"{checkpoint.path} holds no tokenizer")
    tokenizer = Tokenizer.load(checkpoint.path)
    if checkpoint.tokenizer_fingerprint and tokenizer.fingerprint != checkpoint.tokenizer_fingerprint:
        raise UserError(
            f"{checkpoint.path}/tokenizer.json has fingerprint {tokenizer.fingerprint} and the checkpoint was written "
            f"with {checkpoint.tokenizer_fingerprint}"
        )
    return tokenizer
