"""Networks: presets, numbers as given, and what follows for other sizes and bandwidths."""

from __future__ import annotations

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.cost import ring_cost
from dearmpi.plan.network import PRESETS, link_network, parse_network


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


def test_another_bandwidth_keeps_the_latency() -> None:
    fast = link_network("slow", 1e-3, 8e-9, "").with_bandwidth(1.25e9)
    assert fast.name == "10 Gbit/s"
    assert fast.at(2).reduce_scatter == ring_cost(1e-3, 8e-10, 2)


def test_what_is_neither_a_preset_nor_numbers_is_left_to_others() -> None:
    assert parse_network("link.json") is None


@pytest.mark.parametrize("text", ["1e-3,fast", "1,2,3", ",", "nan,1e-9", "-1e-3,1e-9", "1e-3,inf"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="alpha|beta"):
        parse_network(text)
    with pytest.raises(ConfigError):
        parse_network("0,-1")
