"""Checkpoints: a directory that is complete or absent, holding safetensors and JSON, nothing that runs code.

checkpoint.json        what it is: model configuration, provenance, training position, size and hash of each file
model.safetensors      every weight once, under the model's own names
tokenizer.json         the tokenizer the model was trained with
optimizer.safetensors  optimizer state, if training can go on from here

Where training was sharded over processes (FSDP), the directories `model` and `optimizer` stand in the place of the two
files, with one safetensors file per process (see shards.py); everything that reads a checkpoint reads either form.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import hrmlm
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.files import read_json, write_json
from hrmlm.models import LanguageModel, build_model, model_config
from hrmlm.parallel import ALONE, Parallel
from hrmlm.shards import are_sharded, local_part, read_shards, write_shards

FORMAT, SHARDED_FORMAT = 1, 2
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

    @property
    def weights(self) -> Path:
        """The file of the weights, or the directory of their shards."""
        return self.path / (WEIGHTS if WEIGHTS in self.files else _shards_of(WEIGHTS))

    @property
    def optimizer(self) -> Path | None:
        """The file of the optimizer state, or the directory of its shards; None if there is none."""
        shards = _shards_of(OPTIMIZER)
        if OPTIMIZER in self.files:
            return self.path / OPTIMIZER
        return self.path / shards if any(name.startswith(f"{shards}/") for name in self.files) else None

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the file of the weights; of shards, of their hashes together."""
        if WEIGHTS in self.files:
            return self.files[WEIGHTS]["sha256"]
        hashes = [file["sha256"] for name, file in sorted(self.files.items()) if _is_shard(name, WEIGHTS)]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _shards_of(name: str) -> str:
    """The directory that stands in the place of a file of tensors."""
    return name.removesuffix(".safetensors")


def _is_shard(file: str, name: str) -> bool:
    return file.startswith(f"{_shards_of(name)}/")


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
    parallel: Parallel = ALONE,
) -> None:
    """Write a checkpoint that appears under `path` only when it is complete and readable.

    parallel: the processes of the run, which all call this; the first writes what all of them hold, and each writes
    its part of what is sharded.

    Raises: NotFiniteError for a state with NaN or infinity; UserError if `path` exists; OSError if the disk refuses.
    """
    stored: dict[str, Mapping[str, Tensor]] = {WEIGHTS: named_tensors(model)}
    if optimizer_state is not None:
        stored[OPTIMIZER] = optimizer_state
    with parallel.together():
        _check_finite(stored)
    sharded = are_sharded(stored[WEIGHTS])
    with parallel.directory(path) as directory:
        for name, tensors in stored.items():
            if sharded:
                write_shards({n: t.detach() for n, t in tensors.items()}, directory / _shards_of(name), parallel.group)
            elif parallel.is_first:
                _write_tensors({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, directory / name)
        if not parallel.is_first:
            return
        if tokenizer is not None:
            tokenizer.save(directory)
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        manifest = {
            "format": SHARDED_FORMAT if sharded else FORMAT,
            "version": hrmlm.__version__,
            "model": model.config.model_dump(mode="json"),
            "trained_depth": model.trained_depth,
            "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
            "data_fingerprint": data_fingerprint,
            "training": dict(training) if training is not None else None,
            "files": {file.relative_to(directory).as_posix(): _describe(file) for file in files},
        }
        write_manifest(directory, manifest)
        for file in files:  # a file that cannot be read back is no save
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as written:
                    assert sharded or set(written.keys()) == stored[file.name].keys()


def _check_finite(stored: Mapping[str, Mapping[str, Tensor]]) -> None:
    for tensors in stored.values():
        for name, tensor in tensors.items():
            if not torch.isfinite(local_part(tensor)).all():
                raise NotFiniteError(name)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write checkpoint.json, sealed with a hash over all of its values."""
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    write_json(directory / MANIFEST, {**values, "sha256": _seal(values)})


def _seal(manifest: Mapping[str, Any]) -> str:
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode  # what the umask asks for; the library makes files that their owner alone may read
    try:
        save_file(tensors, file)
        file.chmod(mode)
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
    if manifest["format"] not in (FORMAT, SHARDED_FORMAT):
        raise NewerFormatError(
            f"{path} has checkpoint format {manifest['format']} and this version reads {FORMAT} and {SHARDED_FORMAT}; "
            f"it was written by hrmlm {manifest.get('version')}"
        )
    if not _is_complete(manifest):
        raise UserError(f"{manifest_path} does not describe a checkpoint of hrmlm")
    if manifest.get("sha256") != _seal(manifest):
        raise UserError(f"{manifest_path} is damaged: it was changed after it was written")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{path} is incomplete: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise UserError(
                f"{file} is damaged: {file.stat().st_size} bytes where {expected['bytes']} were written; "
                "use another checkpoint of the run"
            )
        if _describe(file)["sha256"] != expected["sha256"]:
            raise UserError(f"{file} is damaged: its contents changed after it was written")
    for directory in {(path / name).parent for name in manifest["files"] if "/" in name}:
        for file in directory.iterdir():  # all of a directory of shards is read
            if file.relative_to(path).as_posix() not in manifest["files"]:
                raise UserError(f"{file} does not belong to this checkpoint; remove it")
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
        and (WEIGHTS in files or any(_is_shard(name, WEIGHTS) for name in files))
        and all(_is_inside(name) for name in files)
        and all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values())
    )


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file of the checkpoint's directory, or of a directory right in it."""
    parts = PurePosixPath(name).parts
    return 1 <= len(parts) <= 2 and not {"..", "/"} & set(parts)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file or a directory of shards, on the CPU. Raises: UserError if it is neither."""
    if file.is_dir():
        return read_shards(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}") from None


def load_weights(model: nn.Module, file: Path) -> None:
    """Copy the weights of a file, or of a directory of shards, into a model.

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
    load_weights(model, checkpoint.weights)
    return model.eval()


def export_checkpoint(checkpoint: Checkpoint, out: str | Path) -> None:
    """Write the weights of a checkpoint in one file, with its tokenizer and record, without optimizer state.

    Raises: UserError if `out` exists.
    """
    save_checkpoint(
        out,
        load_model(checkpoint),
        tokenizer=load_tokenizer(checkpoint) if "tokenizer.json" in checkpoint.files else None,
        training=checkpoint.training,
        data_fingerprint=checkpoint.data_fingerprint,
    )


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
