"""MaskedExchange: averages by coordinate, for which each rank sends only what its mask keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.comm.world import World
from dearmpi.engine.trace.spans import Traffic
from dearmpi.local.client_rounds import mask_of
from dearmpi.plan.data.rounds import Round, RoundRule


class MaskedExchange:
    """The mean of each coordinate over the ``sparsity`` ranks whose masks have it.

    Coordinates are cut into a shard for each rank. A mask keeps the same number of each shard, up
    to one, and follows from its column. So messages have no indices and are equally long; the owner
    of a shard adds them up by rank, and an all-gather brings the means to all. Host memory only.

    waited_s: seconds that this rank has waited so far. traffic: the bytes of an exchange.
    """

    def __init__(self, numel: int, dtype: torch.dtype, rule: RoundRule, world: World) -> None:
        """Ranks are the clients of ``rule``; ``numel`` coordinates (collective)."""
        self._numel, self._rule, self._world = numel, rule, world
        self._shard = -(-numel // world.size)
        most = -(-self._shard * rule.sparsity // rule.cohort)
        self._sent = torch.zeros(world.size, most, dtype=dtype, device="cpu")
        self._arrived = torch.zeros_like(self._sent)
        self._whole = torch.zeros(world.size * self._shard, dtype=dtype, device="cpu")
        self._channel = world.open_channel("masked exchange", window=1)
        itemsize, others = self._sent.itemsize, world.size - 1
        whole = others * self._shard * itemsize
        self.traffic = Traffic(others * most * itemsize, whole, 2 * whole)
        self.waited_s = 0.0

    @torch.no_grad()
    def mean(self, own: Tensor | None, drawn: Round) -> Tensor:
        """The means of a round, 1-D, the same to the bit on all ranks; the next call overwrites it
        (collective). own: this rank's values, 1-D; None if it takes no part.
        """
        start_s = time.perf_counter()
        if own is not None:
            self._pack(own, drawn.cohort.index(self._world.rank))
        self._channel.run("the masked exchange", lambda c: Chain(self._steps(c, drawn)))
        self.waited_s += time.perf_counter() - start_s
        return self._whole[: self._numel]

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()

    def _pack(self, own: Tensor, column: int) -> None:
        self._whole[: self._numel].copy_(own)
        for rank, shard in enumerate(self._whole.view(self._world.size, -1)):
            places = self._places(column, rank)
            torch.index_select(shard, 0, places, out=self._sent[rank, : len(places)])

    def _steps(self, collectives: Collectives, drawn: Round) -> Iterator[Request]:
        yield collectives.start_exchange(self._sent.view(-1), self._arrived.view(-1))
        self._add_up(drawn)
        yield collectives.start_all_gather(self._whole)

    @torch.no_grad()
    def _add_up(self, drawn: Round) -> None:
        """This rank's shard of means, of what ranks have sent, in their order."""
        rank = self._world.rank
        self._arrived[rank].copy_(self._sent[rank])
        shard = self._whole.view(self._world.size, -1)[rank].zero_()
        for client in sorted(drawn.cohort):
            places = self._places(drawn.cohort.index(client), rank)
            shard.index_add_(0, places, self._arrived[client, : len(places)])
        shard.div_(self._rule.sparsity)

    def _places(self, column: int, rank: int) -> Tensor:
        """Within the shard of ``rank``, what the client with ``column`` sends."""
        first = rank * self._shard
        rule = self._rule
        mask = mask_of(
            column, first, first + self._shard, sparsity=rule.sparsity, cohort=rule.cohort
        )
        return mask.nonzero()[:, 0]
