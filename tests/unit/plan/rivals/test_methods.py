"""Methods: what each makes of a small model, by hand, and what must hold for all of them."""

from __future__ import annotations

import math

import pytest

from dearmpi.config import MIB
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import LayerSpec, Workload, float_layer, read_workload
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.network import PRESETS, link_network
from dearmpi.plan.model.profile import LayerTimes, ModelProfile, profile_workload
from dearmpi.plan.rivals.methods import METHODS, parse_method
from dearmpi.plan.rivals.side_by_side import Comparison, compare
from tests.codes import raises
from tests.unit.plan.small import equal

# Over 2 ranks, half of each buffer is sent: 8 bytes take half a second to start and half to send.
SLOW = link_network("slow", 0.5, 1 / 8, "")


def seconds(name: str, profile: ModelProfile) -> float:
    return parse_method(name).prepare(profile, SLOW.at(2)).run().iteration_s


def test_three_equal_layers_by_hand() -> None:
    # A layer's all-reduce takes 2 s, twice its backprop or feed-forward; each half takes 1 s.
    profile = equal(3)
    assert seconds("serial", profile) == pytest.approx(3 + 3 * 2 + 3)
    assert seconds("wfbp", profile) == pytest.approx(1 + 3 * 2 + 3)
    assert seconds("ddp", profile) == pytest.approx(3 + 1 + 3 * 1 + 3)  # one bucket
    # The last gradient comes at 3 s; 2 and 1 share a start-up of 1 s, and 0 has its own.
    assert seconds("mg-wfbp", profile) == pytest.approx(1 + 2 + (1 + 2) + 3)
    # It looks at 1 s, and at 3 s, when the first all-reduce is over.
    assert seconds("horovod", profile) == pytest.approx(1 + 2 + (1 + 2) + 3, abs=2e-3)
    # Every 0.6 s it looks at 1.2 s first.
    assert seconds("horovod:64:600", profile) == pytest.approx(1.2 + 2 + (1 + 2) + 3)


def test_horovod_is_as_it_comes_and_as_bench_measures_it() -> None:
    layers = tuple(float_layer(f"{i}", {"w": (25 * 2**18,)}, 1) for i in range(8))  # 25 MiB each
    profile = ModelProfile(Workload("eight", "", layers, 1, "img"), (LayerTimes(1e-6, 1e-6),) * 8)
    buckets = {
        name: len(parse_method(name).prepare(profile, SLOW.at(2)).layout)
        for name in ("horovod", "horovod:128", "horovod:64:5")
    }
    assert buckets == {"horovod": 2, "horovod:128": 2, "horovod:64:5": 4}


def test_bytescheduler_lets_the_first_layer_overtake() -> None:
    # Layers of 8 million elements, two of which are on their way at once; 2 s for each again.
    layers = tuple(float_layer(f"{i}", {"w": (8_000_000,)}, 1) for i in range(5))
    profile = ModelProfile(Workload("five", "", layers, 1, "img"), (LayerTimes(1, 1),) * 5)
    network = link_network("slow", 0.5, 1 / 32e6, "")
    timeline = parse_method("bytescheduler").prepare(profile, network.at(2)).run()
    # 4, 3 and 2 go as they come. At 5 s, when 3 is done, 0 has come as well, and goes before 1.
    starts = {span.name: round(span.start_s, 6) for span in timeline.lane("reduce-scatter")}
    assert starts == {"RS4": 1, "RS3": 3, "RS2": 5, "RS0": 7, "RS1": 9}
    assert timeline.iteration_s == pytest.approx(9 + 2 + 4)  # F0 runs beside the last all-reduce


def test_a_wfbp_without_latency_is_the_formula() -> None:
    # Equal layers, communication longer than backprop: one layer's backprop stands alone.
    profile = equal(8, feed_forward_s=0.5, backprop_s=0.25)
    network = link_network("free", 0.0, 1 / 8, "")
    timeline = parse_method("wfbp").prepare(profile, network.at(2)).run()
    assert timeline.iteration_s == pytest.approx(0.25 + 8 * 1 + 4)


def test_a_cap_is_taken_where_there_is_one() -> None:
    profile = equal(4)
    cap_mb = 16 / 2**20  # two layers of 8 bytes
    for name, buckets in (("ddp", 2), ("dear", 3)):  # the first layer by itself
        setup = parse_method(f"{name}:{cap_mb}").prepare(profile, SLOW.at(2))
        assert len(setup.layout) == buckets, name


def test_a_cap_that_ddp_is_given_holds_for_its_first_bucket() -> None:
    profile = profile_workload(read_workload("resnet50"), feed_forward_s=0.1, backprop_s=0.2)

    def last_bucket_bytes(name: str) -> int:
        return list(parse_method(name).prepare(profile, SLOW.at(2)).layout)[-1].nbytes

    assert last_bucket_bytes("ddp") < 10 * MIB  # of 1 MiB, and the weight that fills it
    assert last_bucket_bytes("ddp:25") > 20 * MIB


def compare_all(profile: ModelProfile, network_place: int, world_size: int) -> Comparison:
    return compare(profile, PRESETS[network_place], world_size, METHODS[:-1])


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
@pytest.mark.parametrize("network", [0, 1])
def test_what_must_hold_of_every_model(name: str, network: int) -> None:
    profile = profile_workload(read_workload(name), feed_forward_s=0.1, backprop_s=0.2)
    for world_size in (4, 4096):
        comparison = compare_all(profile, network, world_size)
        took = {row.method.name: row.iteration_s for row in comparison.rows}
        assert all(one >= comparison.bound_s * (1 - 1e-9) for one in took.values()), took
        assert took["wfbp"] <= took["serial"] * (1 + 1e-9)
        assert took["bytescheduler"] <= took["wfbp"] * 1.01  # cut tensors start up more often
        assert took["mg-wfbp"] <= took["wfbp"] * (1 + 1e-9)
        assert all(row.timeline.exposed_s >= -1e-9 for row in comparison.rows)
    assert all(one == pytest.approx(0.3) for one in _alone(profile, network).values())


def _alone(profile: ModelProfile, network: int) -> dict[str, float]:
    comparison = compare_all(profile, network, 1)
    # Horovod's thread may look a millisecond late.
    return {
        row.method.name: row.iteration_s for row in comparison.rows if row.method.name != "horovod"
    }


def test_the_plan_is_no_slower_than_what_it_chooses_among() -> None:
    profile = equal(6, feed_forward_s=0.3, backprop_s=0.6)
    comparison = compare(profile, SLOW, 2, METHODS)
    took = {row.method.name: row.iteration_s for row in comparison.rows}
    assert took["dear-plan"] <= min(took["dear"], took["dear-unfused"]) * (1 + 1e-9)


def test_parameters_that_are_not_trained_lie_idle() -> None:
    layers = (
        LayerSpec("frozen", (ParamSpec("frozen.w", (1000,), trained=False),), 1),
        float_layer("head", {"w": (2,)}, 1),
    )
    workload = Workload("small", "", layers, batch_size=1, unit="img")
    profile = ModelProfile(workload, (LayerTimes(1, 1),) * 2)
    for method in METHODS:
        timeline = method.prepare(profile, SLOW.at(2)).run()
        named = {span.name for span in timeline.spans if span.name[:2] == "RS"}
        assert len(named) == 1, method.name
        assert timeline.iteration_s < 6.1, method.name  # the frozen bytes alone take 500 s


def test_no_other_method_means_no_speed_up() -> None:
    comparison = compare(equal(2), SLOW, 2, [parse_method("dear")])
    assert comparison.best_other is None
    assert comparison.speed_up(comparison.rows[0]) is None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("dpp", ("unknown-choice", "'dpp'", "'ddp'")),
        ("wfbp:4", ("setting-without-effect",)),
        ("ddp:", ("out-of-range", "0")),
        ("ddp:-1", ("out-of-range", "0")),
        ("dear:nan", ("out-of-range", "0")),
        ("ddp:8:5", ("out-of-range",)),
        ("horovod:64:0", ("out-of-range", "0.001")),
        ("horovod:64:5:1", ("out-of-range",)),
    ],
)
def test_an_unknown_method_is_refused_with_the_choices(text: str, refused: tuple[str, ...]) -> None:
    with raises(ConfigError, *refused):
        parse_method(text)


def test_a_free_network_leaves_computation() -> None:
    assert LinkModel(0, 0).alone_s(1e9) == 0
    free = link_network("free", 0.0, 0.0, "")
    assert math.isinf(free.bandwidth)
    assert compare(equal(3), free, 64, [parse_method("ddp")]).rows[0].iteration_s == pytest.approx(
        6
    )
