"""Handover: from one assembly to the next, with what is under way on both sides of it.

On the host a step's reduce-scatters, updates and gathers end where they began. Behind them
parameters go from bucket to bucket, and the optimizer's state to the ranks that are to have it,
while training goes on: it waits for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable

from dearmpi.comm.api.chain import Chain
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.progress.later import Later
from dearmpi.comm.world import World
from dearmpi.engine.device.side_stream import HostSideStream
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.iteration.pipeline import Pipeline
from dearmpi.engine.reshard.relocation import Relocation
from dearmpi.engine.reshard.succession import succeed
from dearmpi.engine.setup.assembly import Assembly
from dearmpi.engine.setup.blueprint import Blueprint
from dearmpi.plan.data.schedule import Wait


class Handover:
    """Between two steps, of ``old`` to an assembly of ``blueprint``.

    after: the pipeline that goes on meanwhile, from whose buckets the parameters come one by one;
    None where the last step must be over before.
    """

    def __init__(self, world: World, old: Assembly, blueprint: Blueprint) -> None:
        buckets = [update.bucket for update in old.updates]
        self._world = world
        self._relocation = Relocation(old.updates, old.side, blueprint.layout, rank=world.rank)
        self._history = dict(had for b in buckets for had in b.arrivals.history().items())
        self._times = old.engine.times
        self._num_compared = None if old.replicas is None else old.replicas.num_steps
        self._unguarded = any(bucket.unguarded for bucket in buckets)
        self._settle: Callable[[], None] = lambda: None
        self.after: Pipeline | None = None
        if isinstance(old.engine, Engine) and _can_arrive(old, blueprint):
            self.after = old.engine.pipeline

    def take(self, channel: Channel) -> None:
        """Take the state out of the old assembly, which has nothing under way, so that its buffers
        can go before there are others (collective).
        """
        channel.run("the optimizer's state", lambda c: Chain(self._relocation.take(c)))

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
        after, self.after = self.after, None
        if after is None:
            self._relocate(new, pipeline, channel)
            return
        succession = succeed(after, pipeline, self._world.progress)
        # Gathers first: the feed-forward waits for them.
        self._relocate(
            new, pipeline, channel, may_begin=succession.may_begin, may_travel=succession.is_over
        )
        if self._unguarded:
            new.engine.synchronize()  # on this rank perhaps alone, so that it decides nothing else

    def settle(self) -> None:
        """Wait until all state is in its place. Does nothing when called again."""
        settle, self._settle = self._settle, lambda: None
        settle()

    def _relocate(
        self,
        new: Assembly,
        pipeline: Pipeline,
        channel: Channel,
        *,
        may_begin: Callable[[], bool] = lambda: True,
        may_travel: Callable[[], bool] = lambda: True,
    ) -> None:
        updates, side, relocation = new.updates, new.side, self._relocation

        def start(collectives: Collectives) -> Request:
            steps = relocation.deliver(collectives, updates, side, may_travel=may_travel)
            return Later(may_begin, lambda: Chain(steps))

        side.follow()  # what is whole was made elsewhere
        wait = channel.begin("the optimizer's state", start, pipeline.state_arrived)

        def settle() -> None:
            wait()
            side.lead()

        self._settle = settle


def _can_arrive(old: Assembly, blueprint: Blueprint) -> bool:
    """Whether parameters may arrive later: the same on all ranks, who must all do the same."""
    before = old.blueprint
    same = list(blueprint.names.values()) == list(before.names.values())
    waits_later = Wait.STEP not in (before.schedule.wait, blueprint.schedule.wait)
    on_host = isinstance(old.side, HostSideStream)
    return bool(old.shards) and on_host and waits_later and same and not old.replicas
