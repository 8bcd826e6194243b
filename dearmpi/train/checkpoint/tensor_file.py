"""Tensor file: a model's tensors in one safetensors file, for readers of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name whose tensor is the same memory as an earlier one's to that earlier name."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(place, name)
        if owner != name:
            aliases[name] = owner
    return aliases


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path``, each under its own name.

    Raises OSError or SafetensorError when the file cannot be written.
    """
    # Readers of other libraries look at this key to know whose tensors these are.
    save_file(_separate(tensors), path, metadata={"format": "pt"})


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU of which no two overlap, copying only where needed."""
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name in sorted(packed, key=lambda name: packed[name].data_ptr()):
        start = packed[name].data_ptr()
        stop = start + packed[name].nbytes
        if start < end:
            packed[name] = packed[name].clone()
        end = max(end, stop)
    return packed
