"""Networks: presets, numbers as given, and what follows for other sizes and bandwidths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.cost import Costs, ring_cost
from dearmpi.plan.model.network import PRESETS, Levels, link_network, parse_network, parse_node
from tests.codes import raises


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


def level(alpha_s: float, beta: float, size: int) -> Costs:
    """A ring of ``size`` ranks, as measured."""
    ring = ring_cost(alpha_s, beta, size)
    return Costs(size, ring, ring)


def test_the_busiest_dimension_counts_and_a_chunk_of_the_others() -> None:
    """Of 8 ranks of a host an eighth goes on to the others: the host itself is the busiest here."""
    levels = Levels((level(1e-6, 1e-9, 8), level(1e-4, 4e-9, 4)))
    inner, outer = 7 / 8 * 1e-9, 3 / 4 * 4e-9 / 8
    reduce, gather = levels.at((8, 4))
    assert reduce == gather and reduce.alpha_s == pytest.approx(7e-6 + 3e-4)
    assert reduce.beta_s_per_byte == pytest.approx(inner + outer / 4)
    assert reduce.wire_s(1e6) == pytest.approx(inner * 1e6)
    more, _ = levels.at((8, 64))
    assert more.alpha_s == pytest.approx(7e-6 + 63e-4)
    shared, _ = replace(levels, hidden=0.0).at((8, 4))
    assert shared.beta_s_per_byte == pytest.approx(inner + outer)
    assert shared.wire_s(1e6) == pytest.approx((inner + outer) * 1e6)
    with raises(ConfigError, "topology-misfit", 3, 2):
        levels.at((8, 4, 2))


def test_dimensions_over_one_wire_have_fewer_rounds_and_the_bytes_of_a_ring() -> None:
    network = parse_network("30e-6,8e-10")
    assert network is not None
    flat = network.at(4096).reduce_scatter
    grouped = network.with_topology("64x64", 4096).grouped_at(4096).reduce_scatter
    assert flat.alpha_s == pytest.approx(4095 * 30e-6)
    assert grouped.alpha_s == pytest.approx(2 * 63 * 30e-6)
    assert grouped.beta_s_per_byte == pytest.approx(flat.beta_s_per_byte)
    assert network.with_topology("64x64", 4096).wire_s(4096, 1e8) == pytest.approx(
        network.wire_s(4096, 1e8)
    )


def test_themis_shares_out_what_two_levels_would_leave_idle() -> None:
    """2 x 2 over equal wires of their own: 3/4 of a buffer enters each, not 1 and 1/2."""
    network = parse_network("1e-3,8e-9")
    assert network is not None
    measured = replace(network, levels=Levels((level(0.0, 8e-9, 2), level(0.0, 8e-9, 2))))
    two, even = (
        measured.with_topology(text, 4).grouped_at(4).reduce_scatter.wire_s(1e6)
        for text in ("2x2", "2x2/1x1")
    )
    assert even == pytest.approx(0.75 * two)
    named = measured.with_topology("2x2/1x2.5", 4)
    assert named.topology == "2x2/1x2.5" and "DeAR by 2x2/1x2.5" in named.name
    assert named.wire_s(4, 1e6) <= measured.with_topology("2x2", 4).wire_s(4, 1e6)
    with raises(ConfigError, "setting-missing", "2x2/1x1", "calibrate --topology"):
        network.with_topology("2x2/1x1", 4)


def test_hosts_are_the_nodes_or_what_was_measured() -> None:
    network = parse_network("1e-3,8e-9")
    assert network is not None
    with raises(ConfigError, "setting-missing", "--ranks-per-node"):
        network.with_topology("hosts", 16)
    nodes = network.with_node(parse_node("1e-6,1e-10", 8))
    assert nodes.with_topology("flat", 16) == nodes
    grouped = nodes.with_topology("hosts", 16)
    assert grouped.sizes == (8, 2) and "DeAR by 8x2" in grouped.name
    assert grouped.grouped_at(1).world_size == 1
    pipelined_s, in_turn_s = (
        costs.reduce_scatter.alone_s(1e7) for costs in (grouped.grouped_at(16), nodes.at(16))
    )
    assert pipelined_s < in_turn_s
    measured = replace(network, levels=Levels((level(1e-6, 1e-10, 2), level(1e-3, 8e-9, 2))))
    assert measured.with_topology("hosts", 64).sizes == (2, 32)
    half = measured.sent_as("bf16", [ParamSpec("w", (8,))]).with_topology("2x4", 8)
    assert half.grouped_at(8).all_gather.beta_s_per_byte == pytest.approx(
        measured.with_topology("2x4", 8).grouped_at(8).all_gather.beta_s_per_byte / 2
    )
    for text, told in (("2x4", (8, 64)), ("2x1x32", (64, "2 or more"))):
        with raises(ConfigError, "topology-misfit", *told):
            measured.with_topology(text, 64)
    with raises(ConfigError, "topology-misfit", "6x8", 6, 8):
        nodes.with_topology("6x8", 48)
    with raises(ConfigError, "topology-misfit", 3, 2):
        measured.with_topology("2x4x8", 64)
