"""Tensor file: named tensors in one safetensors file, with tied tensors stored once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dearmpi.errors import CheckpointError

STORABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    }
)


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write ``tensors`` to ``path``; return the aliases, whose tensors are stored only once.

    Raises CheckpointError for a dtype that the format lacks, OSError or SafetensorError when the
    file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in STORABLE or tensor.layout != torch.strided:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype} in {tensor.layout} layout, which safetensors "
                "cannot hold; convert it to a dense tensor of a common dtype"
            )
    aliases = find_aliases(tensors)
    unique = _separate({n: t for n, t in tensors.items() if n not in aliases})
    # Readers of other libraries look at this key to know whose tensors these are.
    save_file(unique, path, metadata={"format": "pt"})
    return aliases


def read_tensors(path: Path, *, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Read all tensors of ``path``; an alias is the very tensor that it names.

    The tensors own their memory: nothing refers to the file afterwards.
    """
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    return stored | {name: stored[owner] for name, owner in aliases.items()}


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
