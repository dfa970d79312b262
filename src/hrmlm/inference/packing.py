"""Packed weights: copies of a model's matrices in the layout that oneDNN reads fastest for a few rows at a time.

On a processor, decoding is bound by reading weights: plain matrix-vector products read them at a half to a third of the
speed of packed ones, and products with 2 to 8 rows are slower still. The copies cost their bytes once more, for as long
as the model is packed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import Linear

ROWS = 8
"""The packed layout is chosen for about so many rows; it gives the same numbers for any."""


def can_pack(model: LanguageModel) -> bool:
    """Whether this model's products run through oneDNN: float32 or bfloat16 (where the processor has instructions for
    it), on the CPU, and a build that has it."""
    weight = model.embedding.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@contextmanager
def packed(model: LanguageModel) -> Iterator[None]:
    """While this lasts, the model's matrices are read from packed copies; do not change its weights meanwhile.

    Does nothing where packing is impossible. Where somebody else has packed the model, it stays packed, and what has
    changed since is packed anew.
    """
    is_owner = model.packed_head is None
    try:
        if can_pack(model):
            _pack_changed(model)
        yield
    finally:
        if is_owner:
            for layer in _layers(model):
                layer.packed = None
            model.packed_head = None


def _layers(model: LanguageModel) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def _pack_changed(model: LanguageModel) -> None:
    """Pack what is not packed, or was packed before its weights changed."""
    for layer in _layers(model):
        if layer.packed is None or layer.packed_version != layer.weight._version:
            layer.packed, layer.packed_version = _pack(layer.weight), layer.weight._version
    table = model.embedding.weight
    if model.packed_head is None or model.packed_version != table._version:
        model.packed_head, model.packed_version = _pack(table[: model.config.n_predicted]), table._version


def packed_bytes(model: LanguageModel) -> int:
    """Bytes that packing adds."""
    layers = [layer.weight for layer in _layers(model)]
    head = model.embedding.weight[: model.config.n_predicted]
    return sum(weight.nbytes for weight in [*layers, head]) if can_pack(model) else 0


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
