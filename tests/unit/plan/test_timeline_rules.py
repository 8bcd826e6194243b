"""What holds for the timeline of any plan, made up at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise, product

import pytest

from dearmpi.plan.data.schedule import Conduct, Schedule, dear
from dearmpi.plan.data.workload import float_layer, read_workload
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.simulate.timeline import Lane, SimulatedSpan, Timeline, simulate
from tests.unit.plan.small import make_profile, own, per_tensor, run


@dataclass(frozen=True)
class Case:
    """A plan made up at random, and its timeline."""

    schedule: Schedule
    window: int
    timeline: Timeline
    wire_s: dict[str, float]

    def transfers(self) -> list[SimulatedSpan]:
        return [*self.timeline.lane("reduce-scatter"), *self.timeline.lane("all-gather")]

    def named(self, name: str) -> SimulatedSpan:
        return next(span for span in self.timeline.spans if span.name == name)


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    count, window = chance.randint(1, 6), chance.randint(1, 3)
    layers = [float_layer(f"{i}", {"w": (chance.randint(1, 9),)}, 1) for i in range(count)]
    profile = make_profile(*layers, feed_forward_s=chance.random(), backprop_s=chance.random())
    link = LinkModel(chance.choice([0.0, 0.3]), chance.random() / 8, chance.choice([0.5, 1.0]))
    costs = Costs(2, link, link, chance.random() / 4, chance.random() / 40, chance.random() / 9)
    order = chance.sample(range(count), count)
    schedule = own(*((bucket, chance.randrange(count)) for bucket in order))
    timeline = run(
        profile,
        schedule,
        costs=costs,
        eager=chance.random() < 0.5,
        window=window,
        gather=chance.choice(["parameters", "gradients"]),
    )
    buckets = per_tensor(profile)
    wire_s = {f"{kind}{b.index}": link.wire_s(b.nbytes) for b in buckets for kind in ("RS", "AG")}
    return Case(schedule, window, timeline, wire_s)


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    timeline = random_case(seed).timeline
    assert timeline.iteration_s >= timeline.bound_s - 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_gathers_keep_the_schedules_order_and_ties(seed: int) -> None:
    case = random_case(seed)
    last_start_s = 0.0
    for gather in case.schedule.all_gathers:
        start_s = case.named(f"AG{gather.bucket}").start_s
        assert start_s >= last_start_s
        assert start_s >= case.named(f"RS{gather.after}").stop_s
        last_start_s = start_s


@pytest.mark.parametrize("seed", range(30))
def test_a_lane_has_no_more_in_flight_than_its_window(seed: int) -> None:
    case = random_case(seed)
    for one in case.transfers():
        in_flight = [
            other
            for other in case.timeline.lane(one.lane)
            if other.start_s <= one.start_s < other.stop_s
        ]
        assert len(in_flight) <= case.window
    alone: tuple[Lane, Lane] = ("compute", "update")
    for lane in alone:
        for earlier, later in pairwise(case.timeline.lane(lane)):
            assert earlier.stop_s <= later.start_s + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_no_more_goes_over_the_wire_than_fits(seed: int) -> None:
    case = random_case(seed)
    for first, last in product(case.transfers(), repeat=2):
        inside_s = sum(
            case.wire_s[span.name]
            for span in case.transfers()
            if first.start_s <= span.start_s and span.stop_s <= last.stop_s
        )
        assert inside_s <= max(0.0, last.stop_s - first.start_s) + 1e-6


@pytest.mark.parametrize("world_size", [4, 4096])
def test_the_work_grows_with_buckets_and_not_with_ranks(world_size: int) -> None:
    profile = profile_workload(read_workload("bert_large"), feed_forward_s=1.0, backprop_s=2.0)
    link = LinkModel(1e-3, 8e-9)
    layout = per_tensor(profile, world_size)
    conduct = Conduct(dear(398), window=2, eager=True)
    timeline = simulate(profile, layout, conduct, Costs(world_size, link, link))
    assert timeline.num_events <= 4 * 398
    assert len(timeline.spans) == 2 * 202 + 3 * 398
