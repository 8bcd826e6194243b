"""Timelines: small cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from dearmpi.config import ScheduleName
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.schedule import Conduct, build_schedule, dear
from dearmpi.plan.data.workload import LayerSpec, float_layer
from dearmpi.plan.model import codec_cost
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.simulate.timeline import Lane, Timeline, simulate
from tests.codes import raises
from tests.unit.plan.small import COSTS, UNIT, equal, make_profile, own, per_tensor, run


def times(timeline: Timeline, *lanes: Lane) -> dict[str, tuple[float, float]]:
    return {
        span.name: (pytest.approx(span.start_s), pytest.approx(span.stop_s))  # type: ignore[misc]
        for lane in lanes
        for span in timeline.lane(lane)
    }


def test_dear_hides_each_half_behind_a_pass() -> None:
    timeline = run(equal(2), dear(2))
    assert times(timeline, "compute", "reduce-scatter", "all-gather") == {
        "B 1": (0, 1),
        "B 0": (1, 2),
        "RS1": (1, 2),
        "RS0": (2, 3),
        "AG0": (3, 4),
        "AG1": (4, 5),
        "F 0": (4, 5),
        "F 1": (5, 6),
    }
    assert timeline.iteration_s == 6 and timeline.exposed_s == 2
    assert timeline.dear_bound_s == timeline.bound_s == timeline.compute_s == 4


@pytest.mark.parametrize(("name", "seconds"), [("dear", 10), ("wfbp", 13), ("serial", 16)])
def test_four_layers_take_what_the_readme_draws(name: ScheduleName, seconds: float) -> None:
    assert run(equal(4), build_schedule(name, 4)).iteration_s == seconds


def test_both_lanes_share_the_wire() -> None:
    timeline = run(equal(2), build_schedule("wfbp", 2))
    assert times(timeline, "reduce-scatter", "all-gather") == {
        "RS1": (1, 2),
        "RS0": (2, 3),
        "AG1": (2, 4),  # in line behind RS0
        "AG0": (4, 5),
    }


def test_a_gather_moved_into_backprop_leaves_the_feed_forward_free() -> None:
    profile = equal(2, backprop_s=2.0)
    assert run(profile, dear(2)).iteration_s == 8
    moved = run(profile, own((1, 1), (0, 0)))
    assert moved.lane("all-gather")[0].start_s == 3
    assert moved.iteration_s == 8
    network_bound = equal(2, backprop_s=2.0, feed_forward_s=0.1)
    assert run(network_bound, dear(2)).iteration_s == pytest.approx(7.1)
    assert run(network_bound, own((1, 1), (0, 0))).iteration_s == pytest.approx(6.2)


def test_without_eager_updates_no_gather_starts_before_the_step() -> None:
    timeline = run(equal(2, backprop_s=2.0), own((1, 1), (0, 0)), eager=False)
    assert times(timeline, "update", "all-gather") == {
        "U1": (4, 4),
        "U0": (5, 5),
        "AG1": (4, 6),  # in line behind RS0
        "AG0": (6, 7),
    }


def test_a_gather_waits_for_the_reduce_scatter_it_is_tied_to() -> None:
    profile = equal(3, backprop_s=2.0)
    assert run(profile, own((2, 2), (0, 0), (1, 0))).lane("all-gather")[0].start_s == 3
    assert run(profile, own((2, 1), (0, 0), (1, 0))).lane("all-gather")[0].start_s == 5


def test_two_in_flight_hide_each_others_latency() -> None:
    late = LinkModel(1.0, 1 / 8)  # two seconds alone, one of them on the wire
    costs = Costs(2, late, late)
    profile = equal(2, backprop_s=0.0)
    one = run(profile, dear(2), costs=costs, window=1)
    two = run(profile, dear(2), costs=costs, window=2)
    assert times(one, "reduce-scatter") == {"RS1": (0, 2), "RS0": (2, 4)}
    assert times(two, "reduce-scatter") == {"RS1": (0, 2), "RS0": (0, 3)}
    assert one.reduce_s == 4 and two.reduce_s == 2


def test_what_a_short_operation_cannot_use_is_left_to_the_other() -> None:
    # RS1 is a start-up only; beside it RS0 has the wire to itself.
    layers = [float_layer("0", {"w": (2,)}, 1), float_layer("1", {"w": (2,)}, 1)]
    profile = make_profile(*layers, backprop_s=0.0)
    costs = Costs(2, LinkModel(1.0, 0.0), UNIT)
    assert times(run(profile, dear(2), costs=costs, window=2), "reduce-scatter") == {
        "RS1": (0, 1),
        "RS0": (0, 1),
    }


def test_updates_run_one_after_the_other() -> None:
    costs = Costs(2, UNIT, UNIT, update_s=1.0, update_s_per_byte=0.25)  # a shard has 4 bytes
    timeline = run(equal(2, backprop_s=0.0), dear(2), costs=costs)
    assert times(timeline, "reduce-scatter", "update") == {
        "RS1": (0, 1),
        "U1": (1, 3),
        "RS0": (1, 2),
        "U0": (3, 5),
    }


def test_codecs_send_less_and_compute_where_updates_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of buckets that are large enough; what has arrived is decoded before anything uses it."""
    monkeypatch.setattr(codec_cost, "LEAST_COMPRESSED", 2)
    codec = CodecCost("int8", 0.5, 0.25, reduce_s_per_byte=0.125, gather_s_per_byte=0.25)
    costs = Costs(2, UNIT, UNIT, update_s=1.0, codec=codec)
    timeline = run(equal(2, backprop_s=0.0), dear(2), costs=costs)
    assert times(timeline, "reduce-scatter", "update", "all-gather", "compute") == {
        "B 1": (0, 0),
        "B 0": (0, 0),
        "RS1": (0, 1.5),  # half a second on the wire, then a second of computation
        "RS0": (0.5, 2.5),
        "U0": (2.5, 3.5),  # both may begin, and its gather comes first
        "U1": (3.5, 4.5),
        "AG0": (3.5, 6.5),
        "AG1": (4.5, 8.5),
        "F 0": (6.5, 7.5),
        "F 1": (8.5, 9.5),
    }
    assert timeline.reduce_s == 1 and timeline.gather_s == 0.5
    plain = run(equal(2, backprop_s=0.0), dear(2), costs=replace(costs, codec=None))
    monkeypatch.setattr(codec_cost, "LEAST_COMPRESSED", 3)
    assert run(equal(2, backprop_s=0.0), dear(2), costs=costs) == plain


def test_gathered_gradients_are_updated_as_a_whole_afterwards() -> None:
    costs = Costs(2, UNIT, UNIT, update_s_per_byte=0.25)  # all of 8 bytes
    timeline = run(equal(1), dear(1), costs=costs, gather="gradients")
    assert times(timeline, "reduce-scatter", "update", "all-gather", "compute") == {
        "B 0": (0, 1),
        "RS0": (1, 2),
        "AG0": (2, 3),
        "U0": (3, 5),
        "F 0": (5, 6),
    }


def test_the_main_threads_part_delays_backprop() -> None:
    costs = Costs(2, UNIT, UNIT, main_thread_s=0.5)
    timeline = run(equal(2), dear(2), costs=costs)
    assert times(timeline, "compute", "reduce-scatter") == {
        "B 1": (0, 1),
        "H1": (1, 1.5),
        "B 0": (1.5, 2.5),
        "H0": (2.5, 3),
        "RS1": (1.5, 2.5),
        "RS0": (3, 4),
        "F 0": (5, 6),
        "F 1": (6, 7),
    }


def test_a_tied_embedding_is_ready_last_and_needed_first() -> None:
    profile = make_profile(
        float_layer("embedding", {"w": (2,)}, 1),
        float_layer("dense", {"w": (2,)}, 1),
        LayerSpec("decoder", (), 1, uses=("embedding.w",)),
    )
    timeline = run(profile, dear(2))
    assert times(timeline, "reduce-scatter")["RS0"] == (3, 4)
    assert times(timeline, "compute")["F embedding"] == (5, 6)


def test_a_layer_that_uses_a_later_layers_parameter_waits_for_it() -> None:
    profile = make_profile(
        LayerSpec("first", (), 1, uses=("last.w",)),
        float_layer("last", {"w": (2,)}, 1),
    )
    timeline = run(profile, dear(1))
    assert times(timeline, "reduce-scatter", "compute")["RS0"] == (2, 3)
    assert times(timeline, "compute")["F first"] == (4, 5)


def test_frozen_parameters_take_no_part() -> None:
    frozen = ParamSpec("0.f", (2,), trained=False)
    profile = make_profile(LayerSpec("0", (frozen, ParamSpec("0.w", (2,))), 1))
    timeline = run(profile, dear(2))
    assert timeline.iteration_s == 4
    assert [span.name for span in timeline.lane("reduce-scatter")] == ["RS1"]


def test_the_picture_shows_all_lanes() -> None:
    picture = """
        compute         BB|  FF
        reduce-scatter   1|0
        update            |10
        all-gather        | 01
        """
    assert run(equal(2), dear(2)).draw(columns=6) == dedent(picture).strip()


def one_by_one(num_buckets: int) -> Conduct:
    return Conduct(dear(num_buckets), window=1, eager=True)


def test_an_operation_that_costs_nothing_ends() -> None:
    # With 20 buckets, rounding leaves some of the 1e-12 s for which such an operation is out.
    layout, free = per_tensor(equal(20)), LinkModel(0.0, 0.0)
    costs = Costs(2, LinkModel(0.1, 1 / 7), free)
    timeline = simulate(equal(20), layout, one_by_one(20), costs)
    assert timeline.iteration_s == pytest.approx(1 + 20 * (0.1 + 8 / 7) + 20)


def test_a_reduce_scatter_waits_until_it_may_be_posted() -> None:
    layout = per_tensor(equal(2))
    timeline = simulate(equal(2), layout, one_by_one(2), COSTS, not_before_s=(0.0, 1.5))
    assert times(timeline, "reduce-scatter") == {"RS1": (1.5, 2.5), "RS0": (2.5, 3.5)}


def test_parts_that_do_not_belong_together_are_refused() -> None:
    profile = equal(2)
    layout = per_tensor(profile)
    with raises(ConfigError, "costs-of-other-world", 2, 4, "costs.at(2"):
        simulate(profile, layout, one_by_one(2), Costs(4, UNIT, UNIT))
    with raises(ConfigError, "plan-inconsistent", 3, 2):
        simulate(profile, layout, one_by_one(3), COSTS)
    with raises(ConfigError, "plan-of-other-model", 3, 2, "2.w is"):
        simulate(equal(3), layout, one_by_one(2), COSTS)
