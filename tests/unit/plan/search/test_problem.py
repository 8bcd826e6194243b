"""The bound, worked out by hand. No plan beats it: see test_planner.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import LayerSpec, float_layer
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.search.problem import least_iteration_s
from tests.unit.plan.small import make_profile

LINK = LinkModel(0.25, 1 / 8)  # 8 bytes: a quarter of a second to start, a second on the wire
COSTS = Costs(2, LINK, LINK)


profile = partial(make_profile, backprop_s=2.0)


def layer(name: str, numel: int) -> LayerSpec:
    return float_layer(name, {"w": (numel,)}, 1)


def least(given: ModelProfile, costs: Costs = COSTS, *, eager: bool = True) -> float:
    return least_iteration_s(given, costs, eager=eager)


def test_where_little_is_sent_the_first_layer_is_what_shows() -> None:
    # Both layers' passes, and the first layer's two operations with their start-up.
    assert least(profile(layer("0", 2), layer("1", 2))) == 6 + 2 * 1.25


def test_the_first_layers_update_shows_too() -> None:
    costs = replace(COSTS, update_s=0.5, update_s_per_byte=0.125, main_thread_s=0.125)
    expected = 6 + 0.125 + 2 * 1.25 + 0.5 + 4 * 0.125  # its shard has 4 bytes
    assert least(profile(layer("0", 2), layer("1", 2)), costs) == expected


def test_what_is_compressed_takes_less_of_the_wire() -> None:
    costs = replace(COSTS, codec=CodecCost("int8", 0.25, 0.5))
    assert least(profile(layer("0", 2), layer("1", 40)), costs) == 2 + 21 * 0.25 + 21 * 0.5 + 1
    larger = replace(COSTS, codec=CodecCost("topk", 2.0, 0.5, density=1.0))
    assert least(profile(layer("0", 2), layer("1", 40)), larger) == 2 + 21 + 21 * 0.5 + 1


def test_where_much_is_sent_the_wire_is_what_shows() -> None:
    # From the end of the last layer's backprop to the beginning of its feed-forward.
    assert least(profile(layer("0", 2), layer("1", 40))) == 2 + 2 * 21 + 1


def test_without_eager_updates_gathers_come_after_backprop() -> None:
    given = profile(layer("0", 2), layer("1", 20), feed_forward_s=0.0)
    assert least(given) == 2 + 2 * 11
    assert least(given, eager=False) == max(4, 2 + 11, 4 + 1) + 11
    slow = profile(layer("0", 2), layer("1", 20), feed_forward_s=0.0, backprop_s=20.0)
    assert least(slow, eager=False) == 40 + 1 + 11  # RS0 has no earlier time either


def test_a_tied_embedding_belongs_to_the_first_layer() -> None:
    tied = profile(layer("0", 20), LayerSpec("decoder", (), 1, uses=("0.w",)))
    assert least(tied) == 6 + 2 * 10.25


def test_frozen_parameters_cost_nothing() -> None:
    frozen = LayerSpec("0", (ParamSpec("0.w", (100,), trained=False),))
    assert least(profile(frozen, layer("1", 2))) == pytest.approx(6)
    assert least(profile(frozen), replace(COSTS, main_thread_s=1.0)) == 3
