"""Migration: from one engine to the next, between two steps, with nothing under way."""

from __future__ import annotations

from dearmpi.comm.api.collectives import Chain
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.engine.setup.build import BuiltEngine
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.engine.state.resharding import Resharding

_WHAT = "the optimizer's state"


class MigrationChannel:
    """On which state travels. Opened at the first use, or before (collective): where a migration is
    known to come, before the wire is busy.
    """

    def __init__(self, world: World) -> None:
        self._world, self.rank = world, world.rank
        self._channel: Channel | None = None

    def open(self) -> Channel:
        """Open it, unless it is open."""
        if self._channel is None:
            self._channel = self._world.open_channel("resharding", window=1)
        return self._channel

    def close(self) -> None:
        """Give it back (collective)."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Migration:
    """Carries parameters' history and the optimizer's state over, from ``old``, whose last step is
    over, to an engine built by ``spec``.
    """

    def __init__(self, channel: MigrationChannel, old: BuiltEngine, spec: EngineSpec) -> None:
        self._channel = channel
        updates = old.updates
        buckets = [update.bucket for update in updates.of_buckets]
        self._resharding = Resharding(
            updates.of_buckets, updates.comm_stream, spec.layout, rank=channel.rank
        )
        self._history = dict(had for b in buckets for had in b.tracker.history().items())
        self._times, self._num_checked = old.engine.times, old.engine.num_checked

    def take(self) -> None:
        """Take the state out of the old engine, so that its buffers can go before there are
        others (collective).
        """
        self._channel.open().run(_WHAT, lambda c: Chain(self._resharding.take(c)))

    def deliver(self, new: BuiltEngine) -> None:
        """Have ``new`` go on where the old engine has ended (collective)."""
        updates, stream = new.updates.of_buckets, new.updates.comm_stream
        for update in updates:
            update.bucket.tracker.recall(self._history)
        new.engine.times, new.engine.num_checked = self._times, self._num_checked
        if not updates:
            return  # the wrapped optimizer has all there is
        stream.wait_for_current()  # what is whole was made elsewhere
        resharding = self._resharding
        self._channel.open().run(_WHAT, lambda c: Chain(resharding.deliver(c, updates, stream)))
        stream.make_current_wait()
