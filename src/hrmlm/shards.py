"""Tensors whose parts lie in several processes, on disk: a directory of safetensors files, one per process.

Written and read by torch.distributed.checkpoint in the format of its Hugging Face storage. Its usual storage would put
a pickle beside the tensors, and nothing here is read that could run code.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hrmlm.errors import UserError


def are_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of the tensors is distributed over processes."""
    return any(hasattr(tensor, "placements") for tensor in tensors.values())


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process; a plain tensor itself."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def write_shards(tensors: Mapping[str, Tensor], directory: Path, group: Any) -> None:
    """Write tensors of the same names in all processes of the group; called by all of them.

    Raises: OSError in all of them if the disk refuses in one.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:  # no Exception: nobody else would catch it
        reasons = [reason for reason, _ in error.failures.values()]
        if not all(isinstance(reason, OSError) for reason in reasons):
            raise RuntimeError(f"{directory} cannot be written: {reasons[0]}") from error
        raise OSError(f"{directory} cannot be written: {reasons[0]}") from None


def read_shards(directory: Path) -> dict[str, Tensor]:
    """All tensors of such a directory, whole, on the CPU; one process is enough. Raises: UserError if it cannot."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.HuggingFaceStorageReader(str(directory))
    try:
        tensors = {}
        for name, item in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(item, TensorStorageMetadata)
            if sum(chunk.sizes.numel() for chunk in item.chunks) != item.size.numel():
                raise UserError(f"parts of {name} are missing")
            tensors[name] = torch.empty(item.size, dtype=item.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it wonders that there is one process
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:  # what safetensors and the file system say
        raise UserError(f"{directory} cannot be read as tensors in shards: {error}") from None
    return tensors
