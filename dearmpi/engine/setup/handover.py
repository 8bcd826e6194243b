"""Handover: from one assembly to the next, between two steps, with nothing under way.

Parameters stay where they are on each rank, and move into new buckets there. The optimizer's state
goes to the ranks that are to have it.
"""

from __future__ import annotations

from dearmpi.comm.api.chain import Chain
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.engine.reshard.relocation import Relocation
from dearmpi.engine.setup.assembly import Assembly
from dearmpi.engine.setup.blueprint import Blueprint

_WHAT = "the optimizer's state"


class Handover:
    """Of ``old``, whose last step is over, to an assembly of ``blueprint``."""

    def __init__(self, world: World, old: Assembly, blueprint: Blueprint) -> None:
        buckets = [update.bucket for update in old.updates]
        self._relocation = Relocation(old.updates, old.side, blueprint.layout, rank=world.rank)
        self._history = dict(had for b in buckets for had in b.arrivals.history().items())
        self._times = old.engine.times
        self._num_compared = None if old.replicas is None else old.replicas.num_steps

    def take(self, channel: Channel) -> None:
        """Take the state out of the old assembly, so that its buffers can go before there are
        others (collective).
        """
        channel.run(_WHAT, lambda c: Chain(self._relocation.take(c)))

    def deliver(self, new: Assembly, channel: Channel) -> None:
        """Have ``new`` go on where the old assembly has ended (collective)."""
        for update in new.updates:
            update.bucket.arrivals.recall(self._history)
        new.engine.times = self._times
        if self._num_compared is not None and new.replicas is not None:
            new.replicas.num_steps = self._num_compared
        if not new.updates:
            return  # the wrapped optimizer has all there is
        new.side.follow()  # what is whole was made elsewhere
        relocation, updates, side = self._relocation, new.updates, new.side
        channel.run(_WHAT, lambda c: Chain(relocation.deliver(c, updates, side)))
        side.lead()
