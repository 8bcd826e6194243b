"""A model's buffers, such as batch normalisation's statistics, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dearmpi.comm.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import Buffers
from dearmpi.engine.broadcast import stored_parts
from dearmpi.engine.join import Joining


class BufferExchange:
    """Makes all buffers of ``model`` those of rank 0, or the average over the ranks, or keeps them.

    Integers, such as counters, are always rank 0's. Inside ``join`` only ranks that still train
    count, of which the last is in rank 0's place, as with DDP. One message per data type and
    exchange.
    """

    def __init__(self, model: nn.Module, world: World, how: Buffers) -> None:
        """``how``: as in ``EngineConfig`` (collective)."""
        self._model = model
        self._rank, self._size = world.rank, world.size
        self._averages = how == "average"
        self._channel: Channel | None = None
        if how != "keep" and world.size > 1:
            self._channel = world.open_channel("buffers", window=1)

    def exchange(self, joining: Joining) -> None:
        """Wait for the other ranks' buffers, if they are wanted (collective)."""
        if self._channel is not None:
            self._exchange(self._channel, joining)

    def close(self) -> None:
        """Give the channel back (collective); no exchange has an effect any more."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @torch.no_grad()
    def _exchange(self, channel: Channel, joining: Joining) -> None:
        # None, too, where all have begun the step before they opened ``join``.
        train = joining.who_trains() if joining.is_open else []
        ranks, root = train or range(self._size), train[-1] if train else 0
        for tensors in _by_kind(_parts(self._model)):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            if self._averages and flat.is_floating_point():
                precise = flat.to(torch.promote_types(flat.dtype, torch.float32))
                if self._rank not in ranks:
                    precise.zero_()
                _sum(channel, precise)
                flat = precise / len(ranks)
            else:
                _broadcast(channel, flat, root)
            for tensor, part in zip(tensors, _split(flat, tensors), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _parts(model: nn.Module) -> Iterator[Tensor]:
    for name, buffer in model.named_buffers():
        yield from stored_parts(buffer, f"buffer {name}")


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that fit into one message, in an order that is the same on every rank."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in tensors])
    return parts


def _sum(channel: Channel, flat: Tensor) -> None:
    channel.run("sum of buffers", lambda c: c.start_all_reduce(flat, "sum"))


def _broadcast(channel: Channel, flat: Tensor, root: int) -> None:
    channel.run("broadcast of buffers", lambda c: c.start_broadcast(flat, root))
