"""Problem: what a planner decides on, with nothing in it that does not matter to the time.

Tensors in feed-forward order, those of each storage kind together, since only they may share a
bucket. A tensor's place is the first layer that uses it: when the backprop of that layer ends its
gradient is ready, and before the feed-forward of that layer it must be current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dearmpi.config import Gather
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.schedule import Conduct, Schedule
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.simulate.flow import Flow, Load
from dearmpi.plan.simulate.timeline import make_load

Cuts = tuple[int, ...]
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

    def groups(self, cuts: Cuts) -> list[list[ParamSpec]]:
        """The parameters of each bucket, numbered as in the layout, idle ones last."""
        groups = [
            [tensor.spec for tensor in self.tensors[start:stop]]
            for start, stop in self._segments(cuts)
        ]
        idle: dict[tuple[str, str, bool], list[ParamSpec]] = {}
        for spec in self.profile.workload.params():
            if not spec.trained:
                idle.setdefault(spec.storage_kind, []).append(spec)
        return [*groups, *idle.values()]

    def sizes(self, cuts: Cuts) -> list[int]:
        """Bytes from each cut to the next."""
        return [sum(self.nbytes[start:stop]) for start, stop in pairwise((*cuts, len(self.nbytes)))]

    def buckets(self, cuts: Cuts) -> Buckets:
        """What each bucket brings."""
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
        """Seconds of an iteration: what ``simulate`` says, without the spans."""
        flow = Flow(buckets.loads, conduct, step_s=buckets.step_s)
        passages = flow.run()
        self.num_events += flow.num_events
        now, passed = flow.forward_start_s, self._passed_s
        before = 0
        for place, bucket in sorted(zip(buckets.places, range(len(passages)), strict=True)):
            now = max(now + passed[place] - passed[before], passages[bucket].current_s)
            before = place
        return now + passed[-1] - passed[before]

    def conduct(self, schedule: Schedule, window: int) -> Conduct:
        """By ``schedule``, with what is given besides."""
        return Conduct(schedule, window, self.eager, self.gather)

    def _segments(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """First and last (exclusive) tensor of each bucket, numbered as in the layout."""
        segments = list(zip(cuts, [*cuts[1:], len(self.tensors)], strict=True))
        if len(self.forced) > 1:
            segments.sort(key=lambda segment: self.tensors[segment[0]].position)
        return segments
