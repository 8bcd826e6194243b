"""The planner against every plan there is, against its bound, and on the paper's models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import NamedTuple

import pytest

from dearmpi.config import EngineConfig, Gather
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec, build_layout, fuse_by_cap
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import (
    AllGather,
    Conduct,
    Launch,
    Schedule,
    Wait,
    dear,
    serial,
    wfbp,
)
from dearmpi.plan.data.workload import (
    LayerSpec,
    Workload,
    float_layer,
    read_workload,
    workload_names,
)
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import LayerTimes, ModelProfile, profile_workload
from dearmpi.plan.search.planner import all_ties, make_plan, plan_of
from dearmpi.plan.search.problem import least_iteration_s
from dearmpi.plan.simulate.timeline import simulate
from tests.codes import raises
from tests.unit.plan.hosts import HOSTS, paper


class Given(NamedTuple):
    """What a planner is given."""

    profile: ModelProfile
    costs: Costs
    eager: bool
    gather: Gather


def made_up(seed: int, num_layers: int) -> Given:
    """A model of one tensor per layer, perhaps with a decoder tied to the first."""
    chance = random.Random(seed)
    layers = [float_layer(f"{i}", {"w": (chance.randint(1, 20),)}, 1) for i in range(num_layers)]
    if chance.random() < 0.3:
        layers.append(LayerSpec("decoder", (), 1, uses=("0.w",)))
    times = tuple(LayerTimes(chance.random(), 2 * chance.random()) for _ in layers)
    workload = Workload("made up", "", tuple(layers), batch_size=1, unit="img")
    link = LinkModel(chance.choice([0.0, 0.2]), chance.random() / 25)
    costs = Costs(2, link, link, chance.random() / 5, 0.0, chance.random() / 10)
    gather: Gather = "gradients" if chance.random() < 0.3 else "parameters"
    return Given(ModelProfile(workload, times), costs, chance.random() < 0.7, gather)


def seconds_of_all(given: Given) -> Iterator[float]:
    """The time of every plan, with no regard to which are alike."""
    specs = list(given.profile.workload.params())
    inner = range(1, len(specs))
    for cuts in (cuts for count in range(len(specs)) for cuts in combinations(inner, count)):
        bounds = [0, *cuts, len(specs)]
        groups = [specs[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
        layout = build_layout(groups, 2)
        for schedule, window in product(schedules(len(groups)), range(1, len(groups) + 1)):
            conduct = Conduct(schedule, window, given.eager, given.gather)
            yield simulate(given.profile, layout, conduct, given.costs).iteration_s


def schedules(count: int) -> Iterator[Schedule]:
    yield from (serial(count), wfbp(count))
    for order in permutations(range(count)):
        for ties in product(range(count), repeat=count):
            gathers = tuple(map(AllGather, order, ties))
            yield replace(dear(count), all_gathers=gathers)


def plan(given: Given) -> Plan:
    return make_plan(
        given.profile, given.costs, world_size=2, eager=given.eager, gather=given.gather
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 10 else pytest.mark.slow) for seed in range(24)]
)
def test_no_plan_of_a_small_model_is_better(seed: int) -> None:
    given = made_up(seed, 3)
    best_s = min(seconds_of_all(given))
    prediction = plan(given).prediction
    assert prediction.iteration_s == pytest.approx(best_s, rel=1e-9)
    assert prediction.bound_s <= best_s + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_no_plan_of_four_tensors_is_better(seed: int) -> None:
    given = made_up(seed, 4)
    assert plan(given).prediction.iteration_s == pytest.approx(min(seconds_of_all(given)), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_improvement_comes_near_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made_up(seed, 3)
    best_s = plan(given).prediction.iteration_s
    monkeypatch.setattr("dearmpi.plan.search.planner.MOST_TENSORS", 0)
    assert best_s <= plan(given).prediction.iteration_s + 1e-9
    assert plan(given).prediction.iteration_s <= best_s * 1.06


def test_ties_that_make_no_difference_are_left_out() -> None:
    ties = list(all_ties(3))
    assert len(set(ties)) == len(ties) < 6 * 27
    # After AG0 was tied to RS2 and came after RS0, only RS1 is news to a gather.
    follow = {gathers[1:] for gathers in ties if gathers[0] == AllGather(0, 2)}
    assert follow == {
        (AllGather(1, 1), AllGather(2, 2)),
        (AllGather(2, 2), AllGather(1, 1)),
        (AllGather(2, 1), AllGather(1, 1)),
    }


EVERY_TIME = [("bert_base", 1.0)]
NOW_AND_THEN = [
    pytest.param(*model, marks=pytest.mark.slow)
    for model in product(workload_names(), [0.5, 1.0, 2.0])
    if model not in EVERY_TIME
]


@pytest.mark.parametrize(("name", "ratio"), [*EVERY_TIME, *NOW_AND_THEN])
def test_plans_of_the_papers_models_are_near_the_bound(name: str, ratio: float) -> None:
    profile = paper(name, ratio)
    made = make_plan(profile, HOSTS, world_size=4, eager=True)
    seconds = made.prediction
    assert seconds.bound_s <= seconds.iteration_s <= 1.01 * seconds.bound_s
    specs = list(profile.workload.params())
    cap = EngineConfig().cap_bytes(sum(spec.nbytes for spec in specs), world_size=4)
    layout = build_layout(fuse_by_cap(specs, cap), 4)
    conduct = Conduct(dear(len(layout)), window=2, eager=True)
    default = simulate(profile, layout, conduct, HOSTS)
    assert seconds.iteration_s <= default.iteration_s


def as_measured(name: str, seed: int) -> tuple[ModelProfile, Costs]:
    """A model whose communication takes as long as its computation, and a link, both with noise."""
    chance = random.Random(seed)
    reduce_scatter, all_gather = (
        LinkModel(chance.uniform(1e-4, 7e-4), 6.4e-9 * chance.uniform(0.98, 1.02)) for _ in range(2)
    )
    costs = Costs(4, reduce_scatter, all_gather, 1e-3, 0.65e-9, 1e-3)
    workload = read_workload(name)
    wire_s = 2 * 6.4e-9 * sum(spec.nbytes for spec in workload.params())
    even = profile_workload(workload, feed_forward_s=wire_s / 3, backprop_s=2 * wire_s / 3)
    noisy = (
        LayerTimes(
            times.feed_forward_s * chance.gauss(1, 0.05), times.backprop_s * chance.gauss(1, 0.05)
        )
        for times in even.times
    )
    return replace(even, times=tuple(noisy)), costs


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))]
)
def test_noise_does_not_lead_the_search_astray(seed: int) -> None:
    """What each bucket costs, as measured, makes a plan of few the best, not one of forty."""
    profile, costs = as_measured("resnet50", seed)
    made = make_plan(profile, costs, world_size=4, eager=True)
    assert made.prediction.iteration_s <= 1.015 * made.prediction.bound_s
    assert len(made.buckets) <= 20


def test_many_equal_layers_come_near_the_bound() -> None:
    profile = paper("equal:100:32", 1)
    made = make_plan(profile, HOSTS, world_size=4, eager=True)
    assert made.prediction.iteration_s <= 1.03 * made.prediction.bound_s


def test_the_plan_is_what_the_simulation_says() -> None:
    profile = paper("equal:50:12", 1)
    made = make_plan(profile, HOSTS, world_size=4, eager=True)
    layout = made.layout(profile.workload.params(), 4)
    timeline = simulate(profile, layout, made.conduct, HOSTS)
    assert made.prediction.iteration_s == timeline.iteration_s
    assert made.prediction.iteration_s <= 1.1 * made.prediction.bound_s
    assert any(gather.after > 0 for gather in made.schedule.all_gathers)  # some move into backprop
    assert Plan.from_json(made.to_json()) == made
    assert make_plan(profile, HOSTS, world_size=4, eager=True) == made


def test_without_eager_updates_gathers_stay_behind_backprop() -> None:
    profile = paper("resnet50", 1)
    made = make_plan(profile, HOSTS, world_size=4, eager=False)
    layout = made.layout(profile.workload.params(), 4)
    timeline = simulate(profile, layout, made.conduct, HOSTS)
    assert timeline.lane("all-gather")[0].start_s >= timeline.step_s
    assert made.prediction.iteration_s == timeline.iteration_s
    assert timeline.iteration_s <= 1.01 * made.prediction.bound_s
    assert made.prediction.bound_s > 1.1 * least_iteration_s(profile, HOSTS, eager=True)


def test_a_plain_schedule_is_chosen_where_it_wins() -> None:
    # Gathered gradients may travel during backprop only where the step waits for them anyway.
    profile = ModelProfile(
        Workload(
            "two",
            "",
            (float_layer("0", {"w": (2,)}, 1), float_layer("1", {"w": (2000,)}, 1)),
            batch_size=1,
            unit="img",
        ),
        (LayerTimes(0.0, 1.0), LayerTimes(0.0, 1.0)),
    )
    link = LinkModel(0.0, 1e-4)
    costs = Costs(2, link, link)
    made = make_plan(profile, costs, world_size=2, eager=False, gather="gradients")
    assert made.schedule.wait is Wait.STEP and made.schedule.launch is Launch.GRADIENTS_READY


@pytest.mark.parametrize("num_layers", [5, 6, 8])
def test_overlap_is_preferred_to_a_plain_schedule_of_the_same_time(num_layers: int) -> None:
    """So that what comes late holds up less: with one bucket the simulated times are the same."""
    profile = profile_workload(
        read_workload(f"equal:0.4:{num_layers}"), feed_forward_s=1e-3, backprop_s=2e-3
    )
    costs = replace(HOSTS, main_thread_s=5e-3)
    made = make_plan(profile, costs, world_size=4, eager=True)
    assert len(made.buckets) == 1 and made.schedule.wait is not Wait.STEP


def test_buckets_in_use_are_a_plan_whatever_the_order_in_which_a_model_lists_its_layers() -> None:
    """As a transformer's, which lists its norms after the layers that follow them."""
    used = tuple(float_layer(name, {"w": (1000,)}, 1) for name in ("a", "norm", "b", "c"))
    workload = Workload("listed otherwise", "", used, batch_size=1, unit="img")
    profile = profile_workload(workload, feed_forward_s=0.01, backprop_s=0.02)
    specs = {spec.name: spec for spec in workload.params()}
    listed = [[specs["a.w"], specs["b.w"]], [specs["norm.w"], specs["c.w"]]]
    layout = build_layout(listed, 4)
    conduct = Conduct(dear(2), window=2, eager=True)
    made = plan_of(profile, HOSTS, layout, conduct, origin="here")
    assert made.layout(workload.params(), 4) == layout
    assert made.prediction.iteration_s >= 0.03


def test_kinds_keep_apart_and_frozen_parameters_lie_idle() -> None:
    half = {"itemsize": 2, "dtype": "bfloat16"}
    layers = tuple(
        LayerSpec(
            f"{i}",
            (
                ParamSpec(f"{i}.w", (1000 * (i + 1),), **half),  # type: ignore[arg-type]
                ParamSpec(f"{i}.norm", (10,)),
                ParamSpec(f"{i}.frozen", (5,), trained=False),
            ),
            1,
        )
        for i in range(4)
    )
    workload = Workload("mixed", "", layers, batch_size=1, unit="img")
    profile = profile_workload(workload, feed_forward_s=0.01, backprop_s=0.02)
    made = make_plan(profile, HOSTS, world_size=4, eager=True)
    layout = made.layout(workload.params(), 4)
    assert len({bucket.placements[0].spec.storage_kind for bucket in layout}) == 3
    assert made.buckets[-1] == tuple(f"{i}.frozen" for i in range(4))
    timeline = simulate(profile, layout, made.conduct, HOSTS)
    assert made.prediction.iteration_s == timeline.iteration_s
    assert made.idle == (len(made.buckets) - 1,)
    late = make_plan(profile, HOSTS, world_size=4, eager=False)
    assert late.num_early_gathers == 0  # since nothing is updated during backprop
    assert Plan.from_json(late.to_json()) == late


def test_what_cannot_be_planned_is_refused() -> None:
    profile = paper("resnet50", 1)
    with raises(ConfigError, "costs-of-other-world", 8, 4, "costs.at(8"):
        make_plan(profile, HOSTS, world_size=8, eager=True)
    frozen = LayerSpec("0", (ParamSpec("0.w", (2,), trained=False),))
    workload = Workload("idle", "", (frozen,), batch_size=1, unit="img")
    with raises(ConfigError, "nothing-to-train"):
        make_plan(
            profile_workload(workload, feed_forward_s=1, backprop_s=1),
            HOSTS,
            world_size=4,
            eager=True,
        )
