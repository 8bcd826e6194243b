"""Layer call: which layer's exchange the ranks are in, compared before its numbers travel."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Completed, Request
from dearmpi.comm.messages.ranks import digest
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.engine.device.device import through_host
from dearmpi.errors import MismatchError


class LayerCall:
    """One call of a layer, which ranks compare before each of its exchanges.

    Their messages have the length that its channels and data type give, so none may be posted for
    another call's. The comparison goes first on the channel, while this rank computes.
    """

    def __init__(self, layer: str, world: World, channel: Channel) -> None:
        """``layer``: what ranks must agree on, in words."""
        self.world, self._channel = world, channel
        self._layer, self._text = layer, ""
        self._seen = _numbers_of(self._text)

    def announce(self, direction: str) -> None:
        """This rank is in the ``direction`` of its call (collective)."""
        self._text = f"the {direction} of {self._layer}"
        seen = self._seen = _numbers_of(self._text)
        self._channel.submit(
            "comparison of calls of SyncBatchNorm", lambda c: c.start_all_reduce(seen, "max")
        )

    def run(self, kind: str, buffer: Tensor) -> None:
        """Exchange ``buffer`` in the call that was announced. Raises MismatchError on all ranks if
        they are not in the same one.
        """
        through_host(buffer, partial(self._run_on_host, kind))
        if self._differ():
            self._refuse(self._channel.all_gather_text("calls of SyncBatchNorm", self._text))

    def _run_on_host(self, kind: str, buffer: Tensor) -> None:
        def start(collectives: Collectives) -> Request:
            if self._differ():  # known by now, as the channel posts one operation after the other
                return Completed()
            if kind == "all-gather":
                return collectives.start_all_gather(buffer)
            return collectives.start_all_reduce(buffer, "sum")

        self._channel.run(f"{kind} of batch statistics", start)

    def _differ(self) -> bool:
        most, of_negatives = self._seen.tolist()
        return bool(most != -of_negatives)

    def _refuse(self, seen: list[str]) -> None:
        rank = next(rank for rank, text in enumerate(seen) if text != seen[0])
        hosts = self.world.hosts
        raise MismatchError(
            f"rank {rank} on {hosts[rank]} is in {seen[rank]} where rank 0 on {hosts[0]} is in "
            f"{seen[0]}; every rank must call the same SyncBatchNorm layers in the same order, and "
            "as often in training, on inputs of one data type",
            code="ranks-call-layers-differently",
        )


def _numbers_of(text: str) -> Tensor:
    """Of which the largest over ranks are each other's negatives where all have one text."""
    number = _hash_of(text)
    return torch.tensor([number, -number], dtype=torch.float64, device="cpu")


@lru_cache(maxsize=4096)
def _hash_of(text: str) -> int:
    return int(digest([text]), 16)
