"""Shard: which buffers can be cut into one for each rank."""

from __future__ import annotations

from dearmpi.comm.api.collectives import Buffer
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.errors import ConfigError


def check_contiguous(operation: str, buffer: Buffer) -> None:
    """Raise ConfigError unless the elements of ``buffer`` lie side by side."""
    if not hasattr(buffer, "is_contiguous"):
        raise ConfigError(
            f"{operation} of an object of type {type(buffer).__name__}, which is no tensor; call "
            "broadcast_object(x) or all_gather_object(x) for any object",
            code="wrong-type",
        )
    if not buffer.is_contiguous():
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements that are not contiguous in memory; pass a "
            "contiguous copy, and copy the result back",
            code="buffer-not-contiguous",
        )


def even_shards(operation: str, buffer: Buffer, size: int) -> Cuts:
    """Equal shards of ``buffer`` for ``size`` ranks. Raises ConfigError if there are none."""
    cuts = even_cuts(buffer.numel(), size)
    if cuts.total != buffer.numel():
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements over {size} ranks: the length must be a "
            "multiple of the world size",
            code="buffer-not-divisible",
        )
    return cuts
