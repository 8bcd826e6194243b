"""Shard: the part of a buffer that belongs to one rank, and which buffers have one."""

from __future__ import annotations

from typing import Any

from dearmpi.comm.api.collectives import Buffer
from dearmpi.errors import ConfigError


def check_contiguous(operation: str, buffer: Buffer) -> None:
    """Raise ConfigError unless the elements of ``buffer`` lie side by side."""
    if not hasattr(buffer, "is_contiguous"):
        raise ConfigError(
            f"{operation} of an object of type {type(buffer).__name__}, which is no tensor; call "
            "broadcast_object(x) or all_gather_object(x) for any object"
        )
    if not buffer.is_contiguous():
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements that do not lie side by side in memory; "
            "pass a contiguous copy, and copy back what it then holds"
        )


def check_shards(operation: str, buffer: Buffer, size: int) -> None:
    """Raise ConfigError unless ``buffer`` has as many elements for each of ``size`` ranks."""
    if buffer.numel() % size:
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements over {size} ranks: the length must be a "
            "multiple of the world size"
        )


def shard_of(buffer: Buffer, rank: int, size: int) -> Any:
    """The shard of ``rank`` among ``size``, in place; the length is a multiple of ``size``."""
    numel = buffer.numel() // size
    return buffer[rank * numel : (rank + 1) * numel]
