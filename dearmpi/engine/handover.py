"""Handover: from one assembly to the next, with what is under way on both sides of it.

Optimizer state goes to the ranks that are to have it, and on the host parameters go from bucket to
bucket, while training goes on: it waits for what it needs.
"""

from __future__ import annotations

from functools import partial

from dearmpi.comm.channel import Channel
from dearmpi.comm.world import World
from dearmpi.engine.assembly import Assembly
from dearmpi.engine.blueprint import Blueprint
from dearmpi.engine.engine import Engine
from dearmpi.engine.pipeline import Pipeline
from dearmpi.engine.relocation import Relocation
from dearmpi.engine.side_stream import HostSideStream
from dearmpi.engine.succession import succeed
from dearmpi.plan.schedule import Wait


class Handover:
    """Between two steps, of ``old``, whose last one is updated, to an assembly of ``blueprint``.

    after: the pipeline whose gathers go on meanwhile, from whose buckets the parameters come one by
    one; None where the last step must be over before.
    """

    def __init__(self, world: World, old: Assembly, blueprint: Blueprint) -> None:
        """Take the state of ``old`` (collective)."""
        self._relocation = Relocation(world, old.updates, blueprint.layout)
        buckets = [update.bucket for update in old.updates]
        self._history = dict(had for b in buckets for had in b.arrivals.history().items())
        self._times = old.engine.times
        self._num_compared = None if old.replicas is None else old.replicas.num_steps
        self._world = world
        self._unguarded = any(bucket.unguarded for bucket in buckets)
        self.after: Pipeline | None = None
        if isinstance(old.engine, Engine) and _can_arrive(old, blueprint):
            self.after = old.engine.pipeline
            self.after.retire()
            for bucket in buckets:
                bucket.memory.discard()  # else the new ones' would be beside it

    def begin(self, new: Assembly, channel: Channel) -> None:
        """Have all that is under way end in ``new`` (collective)."""
        for update in new.updates:
            update.bucket.arrivals.recall(self._history)
        new.engine.times = self._times
        if self._num_compared is not None and new.replicas is not None:
            new.replicas.num_steps = self._num_compared
        if not isinstance(new.engine, Engine):
            return  # the wrapped optimizer has all there is
        pipeline = new.engine.pipeline
        pipeline.awaits_state = True
        relocate = partial(
            self._relocation.begin, channel, new.updates, new.side, pipeline.state_arrived
        )
        if self.after is None:
            relocate()
            return
        succession = succeed(self.after, pipeline, self._world.progress)
        relocate(may_begin=succession.is_over)  # gathers first: the feed-forward waits for them
        self.after = None
        if self._unguarded:  # on this rank perhaps alone, so that it decides nothing else
            new.engine.synchronize()

    def settle(self) -> None:
        """Wait until all state is in its place. Does nothing when called again."""
        self._relocation.settle()


def _can_arrive(old: Assembly, blueprint: Blueprint) -> bool:
    """Whether parameters may arrive later: the same on all ranks, who must all do the same."""
    before = old.blueprint
    same = list(blueprint.names.values()) == list(before.names.values())
    waits_later = Wait.STEP not in (before.schedule.wait, blueprint.schedule.wait)
    on_host = isinstance(old.side, HostSideStream)
    return bool(old.shards) and on_host and waits_later and same and not old.replicas
