"""Problem: what a planner decides on, and the time that no plan can beat.

Tensors stand in feed-forward order, those of each storage kind together, since only they may share
a bucket. A tensor's place is the first layer that uses it. Its gradient is ready when the backprop
of that layer ends, and it must be current before the feed-forward of that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dearmpi.config import Gather
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.schedule import Conduct, Schedule
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

    which is Jackson's bound for one machine with release times and tails, reached by any schedule
    that may cut operations anywhere and pays for no start-up (Carlier, 1982). Without eager
    updates gathers are released by the step at the end of backprop, and for k <= j

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
    least, reduced_s, total = step_s + profile.feed_forward_s, 0.0, 0
    for place, size in enumerate(sizes):
        total += size
        reduce_s, gather_s = costs.reduce_scatter.wire_s(total), costs.all_gather.wire_s(total)
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
    return costs.reduce_scatter.alone_s(nbytes) + update_s + costs.all_gather.alone_s(nbytes)
