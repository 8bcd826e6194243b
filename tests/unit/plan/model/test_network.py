"""Networks: presets, numbers as given, and what follows for other sizes and bandwidths."""

from __future__ import annotations

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.cost import ring_cost
from dearmpi.plan.model.network import PRESETS, link_network, parse_network, parse_node


def test_a_preset_is_found_by_its_name_in_any_case() -> None:
    assert [parse_network(name) for name in ("10gbe", "100GbIB")] == list(PRESETS)
    assert [round(preset.bandwidth * 8e-9, 6) for preset in PRESETS] == [10, 100]


@pytest.mark.parametrize("world_size", [1, 2, 64, 4096])
def test_numbers_make_a_ring_of_any_size(world_size: int) -> None:
    network = parse_network("1e-3,8e-9")
    assert network is not None
    costs = network.at(world_size)
    ring = ring_cost(1e-3, 8e-9, world_size)
    for link in (costs.reduce_scatter, costs.all_gather):
        assert link.alpha_s == pytest.approx(ring.alpha_s)
        assert link.beta_s_per_byte == pytest.approx(ring.beta_s_per_byte)


def test_nodes_add_a_ring_in_each_and_share_their_links() -> None:
    network = parse_network("1e-3,8e-9")
    assert network is not None
    nodes = network.with_node(parse_node("1e-6,1e-10", 8))
    assert "nodes of 8 ranks over 1e-6,1e-10" in nodes.name
    both = nodes.at(16).reduce_scatter
    assert both.alpha_s == pytest.approx(7e-6 + 1e-3)
    assert both.beta_s_per_byte == pytest.approx(7 / 8 * 1e-10 + 1 / 2 * 8e-9)
    inside = ring_cost(1e-6, 1e-10, 4)
    assert nodes.at(4).all_gather.alpha_s == pytest.approx(inside.alpha_s)
    assert nodes.at(4).all_gather.beta_s_per_byte == pytest.approx(inside.beta_s_per_byte)
    assert nodes.at(4096).world_size == 4096
    half = nodes.sent_as("bf16", [ParamSpec("w", (8,))]).at(16).all_gather
    assert half.beta_s_per_byte == pytest.approx(both.beta_s_per_byte / 2)
    assert half.alpha_s == pytest.approx(both.alpha_s)


def test_another_bandwidth_keeps_the_latency() -> None:
    fast = link_network("slow", 1e-3, 8e-9, "").with_bandwidth(1.25e9)
    assert fast.name == "10 Gbit/s"
    assert fast.at(2).reduce_scatter == ring_cost(1e-3, 8e-10, 2)


def test_what_is_neither_a_preset_nor_numbers_is_left_to_others() -> None:
    assert parse_network("link.json") is None


@pytest.mark.parametrize(
    "text", ["1e-3,fast", "1,2,3", ",", "nan,1e-9", "-1e-3,1e-9", "1e-3,inf", "0,1e305"]
)
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_network(text)
    assert refused.value.code in ("malformed-value", "out-of-range") and text in str(refused.value)
    with pytest.raises(ConfigError):
        parse_network("0,-1")


def test_the_busier_of_two_links_bounds_all_methods() -> None:
    """Not both, one after the other: a bucket may be in the nodes while another is between them."""
    network = parse_network("10GbE")
    assert network is not None
    outside_s = network.with_node(parse_node("0,0", 8)).wire_s(64, 1e8)
    assert outside_s == pytest.approx(network.wire_s(8, 1e8))
    slow_inside = network.with_node(parse_node("0,1e-8", 8))
    assert slow_inside.wire_s(64, 1e8) == pytest.approx(2 * 7 / 8 * 1e8 * 1e-8)
    assert outside_s < slow_inside.wire_s(64, 1e8)
    halves = slow_inside.at(64)
    both_s = halves.reduce_scatter.wire_s(1e8) + halves.all_gather.wire_s(1e8)
    assert both_s == pytest.approx(outside_s + slow_inside.wire_s(64, 1e8))
