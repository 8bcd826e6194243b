"""Problem: what a planner decides on, and the time that no plan can beat.

Tensors stand in feed-forward order, those of each storage kind together, since only they may share
a bucket. A tensor's place is the first layer that uses it. Its gradient is ready when the backprop
of that layer ends, and it must be current before the feed-forward of that layer.

``Draft`` is a plan in the making, with its simulated time. ``interleave`` decides which all-gathers
run during backprop, and between which reduce-scatters.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dearmpi.config import Gather
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.schedule import AllGather, Conduct, Launch, Schedule, Wait, serial, wfbp
from dearmpi.plan.data.workload import Workload
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.simulate.flow import Flow, Load
from dearmpi.plan.simulate.timeline import make_load

BucketStarts = tuple[int, ...]
"""Where buckets begin in ``Problem.tensors``, in rising order, 0 included."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A trained parameter. position: its number in the model. place: the first layer to use it."""

    spec: ParamSpec
    position: int
    place: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """What cuts make, numbered as in the layout. places: the first layer to use each."""

    loads: tuple[Load, ...]
    places: tuple[int, ...]
    order: tuple[int, ...]  # in which they become ready
    step_s: float


class Problem:
    """A profile and costs, prepared to judge many cuts.

    num_events: steps of all simulations so far.
    """

    def __init__(self, profile: ModelProfile, costs: Costs, *, eager: bool, gather: Gather) -> None:
        self.profile, self.costs, self.eager, self.gather = profile, costs, eager, gather
        first_users = profile.workload.first_users()
        tensors = [
            Tensor(spec, position, first_users[spec.name])
            for position, spec in enumerate(profile.workload.params())
            if spec.trained
        ]
        kinds = list(dict.fromkeys(tensor.spec.storage_kind for tensor in tensors))
        self.tensors = sorted(tensors, key=lambda tensor: kinds.index(tensor.spec.storage_kind))
        self.forced = frozenset(
            number
            for number, tensor in enumerate(self.tensors)
            if not number or tensor.spec.storage_kind != self.tensors[number - 1].spec.storage_kind
        )
        self.nbytes = [tensor.spec.nbytes for tensor in self.tensors]
        self._numels = [0, *accumulate(tensor.spec.numel for tensor in self.tensors)]
        self._ready_s = profile.backprop_stops_s()
        self._passed_s = [0.0, *accumulate(times.feed_forward_s for times in profile.times)]
        self.num_events = 0

    def groups(self, cuts: BucketStarts) -> list[list[ParamSpec]]:
        """The parameters of each bucket, numbered as in the layout; idle buckets last."""
        groups = [
            [tensor.spec for tensor in self.tensors[start:stop]]
            for start, stop in self._segments(cuts)
        ]
        idle: dict[tuple[str, str, bool], list[ParamSpec]] = {}
        for spec in self.profile.workload.params():
            if not spec.trained:
                idle.setdefault(spec.storage_kind, []).append(spec)
        return [*groups, *idle.values()]

    def sizes(self, cuts: BucketStarts) -> list[int]:
        """Bytes from each cut to the next."""
        return [sum(self.nbytes[start:stop]) for start, stop in pairwise((*cuts, len(self.nbytes)))]

    def buckets(self, cuts: BucketStarts) -> Buckets:
        """The loads, places and order of the buckets that ``cuts`` make."""
        segments = self._segments(cuts)
        places = [min(t.place for t in self.tensors[start:stop]) for start, stop in segments]
        order = sorted(range(len(segments)), key=lambda bucket: (-places[bucket], -bucket))
        rank = {bucket: number for number, bucket in enumerate(order, 1)}
        handing_s = self.costs.main_thread_s
        loads = tuple(
            make_load(
                self._numels[stop] - self._numels[start],
                self.tensors[start].spec.itemsize,
                self.costs,
                ready_s=self._ready_s[place] + handing_s * rank[bucket],
                gather=self.gather,
            )
            for bucket, ((start, stop), place) in enumerate(zip(segments, places, strict=True))
        )
        step_s = self._ready_s[0] + handing_s * len(segments)
        return Buckets(loads, tuple(places), tuple(order), step_s)

    def judge(self, buckets: Buckets, conduct: Conduct) -> float:
        """Seconds of an iteration, as ``simulate`` finds them, without the spans."""
        flow = Flow(buckets.loads, conduct, step_s=buckets.step_s)
        bucket_times = flow.run()
        self.num_events += flow.num_events
        now, passed = flow.forward_start_s, self._passed_s
        before = 0
        for place, bucket in sorted(zip(buckets.places, range(len(bucket_times)), strict=True)):
            now = max(now + passed[place] - passed[before], bucket_times[bucket].current_s)
            before = place
        return now + passed[-1] - passed[before]

    def conduct(self, schedule: Schedule, window: int) -> Conduct:
        """The conduct of ``schedule`` with this problem's settings."""
        return Conduct(schedule, window, self.eager, self.gather)

    def _segments(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """First and last (exclusive) tensor of each bucket, numbered as in the layout."""
        segments = list(zip(cuts, [*cuts[1:], len(self.tensors)], strict=True))
        if len(self.forced) > 1:
            segments.sort(key=lambda segment: self.tensors[segment[0]].position)
        return segments


def least_iteration_s(
    profile: ModelProfile, costs: Costs, *, eager: bool, gather: Gather = "parameters"
) -> float:
    """Seconds that an iteration takes at least, by ``simulate``'s rules.

    The wire is one machine. A parameter's reduce-scatter is released when the backprop of the
    first layer k that uses it is over, at r(k); its all-gather must be over before that layer's
    feed-forward, after which f(k), the feed-forward from layer k on, is still to come. So all
    that belongs to layers 0 to k, both ways, lies between r(k) and the end less f(k):

        T >= r(k) + RS(0..k) + AG(0..k) + f(k)                                          for all k

    This is Jackson's bound for one machine with release times and tails. It is reached by any
    schedule that may cut operations anywhere and pays for no start-up (Carlier, 1982). Without
    eager updates gathers are released by the step at the end of backprop, and for k <= j

        T >= max(backprop, r(k) + RS(0..k)) + AG(0..j) + f(j)

    What a parameter cannot avoid by itself is a further bound: it is handed over, reduced, updated
    and gathered one after the other, in a bucket that has at least its size.
    """
    sizes, largest = _sizes_by_place(profile.workload)
    released = profile.backprop_stops_s()
    tails = [*accumulate(times.feed_forward_s for times in reversed(profile.times))][::-1]
    handed_s = costs.main_thread_s if any(sizes) else 0.0
    step_s = profile.backprop_s + handed_s
    waits = not eager and gather == "parameters"
    reduced_share, gathered_share = costs.least_sent
    least, reduced_s, total = step_s + profile.feed_forward_s, 0.0, 0
    for place, size in enumerate(sizes):
        total += size
        reduce_s = costs.reduce_scatter.wire_s(reduced_share * total)
        gather_s = costs.all_gather.wire_s(gathered_share * total)
        reduced_s = max(reduced_s, released[place] + reduce_s)
        least = max(least, released[place] + reduce_s + gather_s + tails[place])
        if waits and total:
            least = max(least, max(step_s, reduced_s) + gather_s + tails[place])
        if size:
            chain_s = _chain_s(largest[place], costs, gather)
            least = max(least, released[place] + handed_s + chain_s + tails[place])
    return least


def _sizes_by_place(workload: Workload) -> tuple[list[int], list[int]]:
    """Bytes of all parameters that a layer is the first to use, and of the largest of them."""
    first_users = workload.first_users()
    sizes, largest = [0] * len(workload.layers), [0] * len(workload.layers)
    for spec in workload.params():
        if spec.trained:
            place = first_users[spec.name]
            sizes[place] += spec.nbytes
            largest[place] = max(largest[place], spec.nbytes)
    return sizes, largest


def _chain_s(nbytes: int, costs: Costs, gather: Gather) -> float:
    """One parameter on its way, undisturbed."""
    updated = nbytes / costs.world_size if gather == "parameters" else nbytes
    update_s = costs.update_s + costs.update_s_per_byte * updated
    reduced, gathered = (share * nbytes for share in costs.least_sent)
    return costs.reduce_scatter.alone_s(reduced) + update_s + costs.all_gather.alone_s(gathered)


PATIENCES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Draft:
    """Where buckets begin, and how what they make travels.

    patience: how its gathers were interleaved; None: in another way.
    """

    seconds: float
    cuts: BucketStarts
    conduct: Conduct
    patience: float | None = None

    @property
    def schedule(self) -> Schedule:
        return self.conduct.schedule

    @property
    def window(self) -> int:
        return self.conduct.window

    @property
    def merit(self) -> tuple[float, bool]:
        """The least is best: by time to the nanosecond, then schedules whose late gathers hold up
        only the feed-forward, and not what a script does between steps.
        """
        return round(self.seconds, 9), self.schedule.wait is Wait.STEP


class Drafts:
    """Makes drafts for one problem and judges them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def interleaved(self, cuts: BucketStarts, *, window: int, patience: float) -> Draft:
        """Gathers in the wire's idle time (``interleave``)."""
        buckets = self._problem.buckets(cuts)
        waits = not self._problem.eager
        gathers = interleave(
            buckets,
            released_s=buckets.step_s if waits else 0.0,
            window=window,
            patience=patience,
        )
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window, patience)

    def tied(self, cuts: BucketStarts, gathers: Sequence[AllGather], *, window: int) -> Draft:
        buckets = self._problem.buckets(cuts)
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window)

    def dear(self, cuts: BucketStarts, *, window: int) -> Draft:
        """All gathers after the last reduce-scatter, in feed-forward order."""
        buckets = self._problem.buckets(cuts)
        gathers = [AllGather(bucket, buckets.order[-1]) for bucket in reversed(buckets.order)]
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window)

    def plain(self, cuts: BucketStarts, *, window: int) -> Iterator[Draft]:
        """The schedules without overlap of the feed-forward: serial and WFBP."""
        buckets = self._problem.buckets(cuts)
        for make in (serial, wfbp):
            schedule = make(len(buckets.order))
            if schedule.reduce_scatters == buckets.order:
                yield self._judge(cuts, buckets, schedule, window)

    def _judge(
        self,
        cuts: BucketStarts,
        buckets: Buckets,
        schedule: Schedule,
        window: int,
        patience: float | None = None,
    ) -> Draft:
        conduct = self._problem.conduct(schedule, window)
        return Draft(self._problem.judge(buckets, conduct), cuts, conduct, patience)


def _overlapped(buckets: Buckets, gathers: Sequence[AllGather]) -> Schedule:
    """Reduce-scatters as they become ready; the feed-forward waits bucket by bucket."""
    return Schedule(
        "dear", buckets.order, tuple(gathers), Launch.GRADIENTS_READY, Wait.FEED_FORWARD
    )


def interleave(
    buckets: Buckets, *, released_s: float, window: int, patience: float
) -> tuple[AllGather, ...]:
    """Gathers in the order of Jackson's rule on one wire: what is needed first goes first.

    A reduce-scatter that is ready always precedes: it belongs to earlier layers than all that was
    reduced before, and has its gather still to come. The wire's idle time goes to the reduced
    bucket whose layers run first, which leaves to the feed-forward what it needs last. Operations
    are not cut here, so one that starts shortly before a reduce-scatter is ready would hold it up:
    it starts only if ``patience`` times its length is left until then.

    released_s: no gather starts before, 0 with eager updates.
    """
    lengths = [max(b.gather.wire_s, b.gather.alone_s / window) for b in buckets.loads]
    gathers: list[AllGather] = []
    waiting: list[tuple[int, int]] = []  # place and bucket: reduced, not gathered, least first
    updated = [math.inf] * len(lengths)
    queue = list(reversed(buckets.order))
    now, updating_s, last = 0.0, 0.0, -1
    while queue or waiting:
        next_s = buckets.loads[queue[-1]].ready_s if queue else math.inf
        if next_s <= now:
            last = queue.pop()
            load = buckets.loads[last]
            now += max(load.reduce.wire_s, load.reduce.alone_s / window)
            updating_s = max(updating_s, now) + load.reduce_codec_s + load.update_s
            updated[last] = max(updating_s, released_s)
            insort(waiting, (buckets.places[last], last))
            continue
        for entry in waiting:
            bucket = entry[1]
            if updated[bucket] <= now and patience * lengths[bucket] <= next_s - now:
                waiting.remove(entry)
                gathers.append(AllGather(bucket, after=last))
                now += lengths[bucket]
                break
        else:
            later = (updated[bucket] for _, bucket in waiting if updated[bucket] > now)
            now = min([next_s, *later])
    return tuple(gathers)
