"""Iteration: what is true of one iteration only, and what all parts of an engine share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dearmpi.comm.world import World
from dearmpi.device.comm_stream import CommStream
from dearmpi.engine.agreement.join import Joining
from dearmpi.engine.agreement.replicas import Replicas
from dearmpi.engine.agreement.step_agreement import Edits, Loads
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.trace.spans import CommunicationClock, Spans
from dearmpi.engine.update.update import Options
from dearmpi.plan.data.schedule import AllGather, Conduct

# For so many steps an incomplete bucket goes last. Deferred without need, it alone is late; not
# deferred where it should be, it holds up all buckets behind it.
_STEPS_DEFERRED = 8


@dataclass(slots=True)
class Iteration:
    """From the first gradient of a backprop to the last stage of the last bucket.

    reduce_scatters, all_gathers: in the order in which they are submitted.
    active: buckets with a parameter that requires grad; the others take no part.
    options: hyperparameters for the update; None until they are known.
    stepped: whether the user has called ``step()``.
    stepping: the main thread is in the middle of submitting that step. A signal handler may read
        parameters there. So may a script after an exception has ended ``step()`` there.
    incomplete: buckets that this rank's backprop has not filled by itself; after the step
        agreement, buckets that the backprop of any rank has not filled.
    used: after the step agreement, for each bucket, a byte for each parameter: 0 if no rank had a
        gradient for it.
    started: buckets whose reduce-scatter is submitted; its lane posts it when its turn comes.
    reduced: buckets whose reduce-scatter is complete.
    num_gathers: how many of ``all_gathers``, from the first on, are submitted; the gather of a
        bucket that takes no part counts as well.
    num_finished: buckets that have passed all stages.
    gathers_early: a script reads whole gradients before the step.
    """

    reduce_scatters: tuple[int, ...] = ()
    all_gathers: tuple[AllGather, ...] = ()
    active: frozenset[int] = frozenset()
    options: Options | None = None
    stepped: bool = False
    stepping: bool = False
    incomplete: frozenset[int] = frozenset()
    used: Sequence[bytes] | None = None
    started: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    num_gathers: int = 0
    num_finished: int = 0
    gathers_early: bool = False

    @property
    def is_step(self) -> bool:
        """Whether the user has called ``step()`` for it, and it is none that begins or follows."""
        return self.stepped and self.options is not None

    def is_finished(self) -> bool:
        """Whether every active bucket has passed all stages."""
        return self.num_finished == len(self.active)

    def rewind(self) -> None:
        """Begin the lanes anew for a further backprop of the same iteration."""
        self.started.clear()
        self.reduced.clear()
        self.num_gathers = 0
        self.gathers_early = False


class DeferredBuckets:
    """Buckets that backprop does not fill by itself go last, to hold up no others.

    They follow from what the ranks have agreed on in the last steps but one: to wait for the
    agreement of the last step might be to wait for other ranks.
    """

    def __init__(self) -> None:
        self._agreements: deque[Iteration] = deque(maxlen=_STEPS_DEFERRED + 1)

    def note(self, iteration: Iteration) -> None:
        """The step agreement of ``iteration`` is under way."""
        self._agreements.append(iteration)

    def are_known(self) -> bool:
        """Whether the agreement that decides the order of the next iteration is complete."""
        return len(self._agreements) < 2 or self._agreements[-2].used is not None

    def find(self) -> frozenset[int]:
        """The buckets' numbers, once they ``are_known``."""
        past = list(self._agreements)[:-1]
        return frozenset[int]().union(*(one.incomplete for one in past))


class EngineState:
    """What the parts of one engine share. The iteration under way is replaced here and nowhere
    else.

    buckets: in feed-forward order. conduct: their stages and the order in which they travel.
    comm_stream: where on a device the progress thread works.
    replicas: None without ``check_every``.
    reduces, gathers, control: channels, one for each kind of operation.
    clock: for how long buckets travel, and the main thread waits.
    training: the name by which ranks compare what they have begun of it.
    joining: what ranks exchange inside ``join``. loads: which states were loaded. edits: what a
        script has changed of averaged gradients.
    iteration: the one under way. deferred: which buckets go last in the next one.
    num_reduced: times that gradients were, or are being, reduced.
    num_steps: steps before the iteration, also those before its state was saved.
    keeps_gradients: ``param.grad`` serves all reads, and stays after the step.
    read_loss_scale: by what losses are multiplied from now on; None: by nothing.
    """

    def __init__(
        self,
        world: World,
        buckets: Sequence[BucketRuntime],
        conduct: Conduct,
        *,
        comm_stream: CommStream,
        spans: Spans,
        check_every: int,
        training: str = "",
    ) -> None:
        """Opens the channels (collective). ``check_every``: steps; 0 for no checks."""
        self.world, self.training = world, training
        self.buckets = tuple(buckets)
        self.conduct, self.schedule = conduct, conduct.schedule
        self.comm_stream, self.spans = comm_stream, spans
        rank, size, every = world.rank, world.size, check_every
        self.replicas = Replicas(buckets, rank=rank, size=size, every=every) if every else None
        # What carries a device's tensors keeps to the schedule's window on the network itself.
        window = conduct.window + comm_stream.num_ahead
        self.reduces = world.open_channel(
            "reduce-scatter", window=window, wrap=comm_stream.wrap_for_device
        )
        self.gathers = world.open_channel(
            "all-gather", window=window, wrap=comm_stream.wrap_for_device
        )
        self.control = world.open_channel("step agreement", window=1)
        self.clock = CommunicationClock(spans)
        self.clock.watch(reduces=self.reduces, gathers=self.gathers)
        self.joining = Joining(self.control, rank=world.rank, size=world.size)
        self.loads, self.edits = Loads(), Edits()
        self.deferred = DeferredBuckets()
        self.num_reduced = self.num_steps = 0
        self.keeps_gradients = False
        self.read_loss_scale: Callable[[], float] | None = None
        self.iteration = Iteration(stepped=True)

    def begin_iteration(self, active: frozenset[int], options: Options | None) -> None:
        """Replace the last iteration, which must be finished, and whose order must be known."""
        self.num_reduced += 1
        self._replace(Iteration(active=active, options=options))

    def discard_iteration(self) -> None:
        """Go back to where the iteration before has ended."""
        self._replace(Iteration(stepped=True))

    def exchange_replicas(self) -> None:
        """Let other ranks know what the last step has led to, which is over (collective)."""
        if self.replicas is not None:
            self.replicas.announce(self.control)

    def close_channels(self) -> None:
        """Give the channels back once they are empty (collective)."""
        for channel in (self.reduces, self.gathers, self.control):
            channel.close()

    def _replace(self, iteration: Iteration) -> None:
        self.num_steps += self.iteration.is_step
        self.comm_stream.wait_for_current()  # options may be tensors
        if self.replicas is not None:
            self.replicas.begin()
        self.edits.missed.clear()
        order = self.schedule.with_last(self.deferred.find())
        iteration.reduce_scatters, iteration.all_gathers = order
        self.iteration = iteration
