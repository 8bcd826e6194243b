"""Shard: the part of a buffer that belongs to one rank."""

from __future__ import annotations

from typing import Any

from dearmpi.comm.api import Buffer


def shard_of(buffer: Buffer, rank: int, size: int) -> Any:
    """The shard of ``rank`` among ``size``, in place; the length is a multiple of ``size``."""
    numel = buffer.numel() // size
    return buffer[rank * numel : (rank + 1) * numel]
