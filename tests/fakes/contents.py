"""What is in buffers: the arithmetic and the bookkeeping that stand in for a network in tests."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from dearmpi.comm.api.collectives import Buffer
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.cuts import Cuts, even_cuts


def nbytes_of(buffer: Buffer | None, carrier: Buffer | None = None) -> int:
    """The bytes of ``buffer``, as elements of ``carrier`` if there is one."""
    return (
        0
        if buffer is None
        else buffer.numel() * (buffer if carrier is None else carrier).element_size()
    )


def as_sent(buffer: Any, carrier: Any) -> Any:
    """A copy of ``buffer`` with what is left of its values in the dtype of ``carrier``."""
    if buffer is None or carrier is buffer:
        return None if buffer is None else buffer.clone()
    return buffer.clone().copy_(carrier.new_empty(buffer.numel()).copy_(buffer))


def signature_of(
    label: str, detail: Any, buffer: Buffer | None, carrier: Buffer | None, cuts: Cuts | None
) -> str:
    """What ranks must agree on."""
    what = label if detail is None else f"{label}({detail})"
    if buffer is None or carrier is None:
        return what
    what += f" of {buffer.numel()} {buffer.dtype}"
    what += f" cut at {list(cuts.offsets)}" if cuts is not None else ""
    return what if carrier is buffer else f"{what} sent as {carrier.dtype}"


def bytes_of(buffer: Buffer) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), nbytes_of(buffer))


def spoil(buffer: Any, *, keep: int | None = None, size: int = 1, cuts: Cuts | None = None) -> None:
    """Overwrite ``buffer`` but for the shard of rank ``keep``: the rest must not be read."""
    cuts = cuts or even_cuts(buffer.numel(), size)
    for rank in range(cuts.num_ranks):
        if rank != keep:
            shard = buffer[cuts.slice_of(rank)]
            ctypes.memset(shard.data_ptr(), 0xFF, nbytes_of(shard))


def combine(kind: str, detail: Any, parts: list[Any], cuts: Cuts | None = None) -> Any:
    """What an operation on ``parts`` (by rank) makes, whole; the parts may be used up."""
    if kind == "BC":
        return parts[detail]
    if kind == "EX":
        return parts
    total, size = parts[0], len(parts)
    for rank, part in enumerate(parts[1:], start=1):
        if kind == "AG":
            own = (cuts or even_cuts(total.numel(), size)).slice_of(rank)
            total[own].copy_(part[own])
        elif detail in ("max", "min"):
            total.copy_(_extreme(total, part, detail))
        else:
            total.add_(part)
    return total


def _extreme(one: Any, other: Any, op: str) -> Any:
    if isinstance(one, HostBuffer):
        choose = np.maximum if op == "max" else np.minimum
        return HostBuffer(choose(one.array, other.array))
    return one.maximum(other) if op == "max" else one.minimum(other)
