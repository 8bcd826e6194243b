"""The paper's setting: assumed times, and what part of a gain can be overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.network import PRESETS, Network
from dearmpi.plan.rivals.side_by_side import (
    CLAIMS,
    MODELS,
    WORLD_SIZE,
    PaperGain,
    compare,
    fused_methods,
    paper_profile,
    unfused_methods,
)
from tests.codes import raises

RATE = LinkModel(0.0, 1e-9)


def test_times_are_those_of_the_public_figures() -> None:
    for model, images_per_s in (("resnet50", 294), ("inception_v4", 79)):
        profile = paper_profile(read_workload(model))
        compute_s = profile.feed_forward_s + profile.backprop_s
        assert profile.workload.batch_size / compute_s == pytest.approx(images_per_s)
        assert profile.backprop_s == pytest.approx(2 * profile.feed_forward_s)
        assert "2080 Ti" in profile.device


def test_other_models_compute_at_the_same_rate() -> None:
    rates = []
    for model in ("resnet50", "bert_base", "densenet201"):
        profile = paper_profile(read_workload(model))
        flops = sum(layer.flops for layer in profile.workload.layers)
        rates.append(flops * profile.workload.batch_size / profile.backprop_s)
    assert rates == pytest.approx([rates[0]] * 3)


def test_nothing_is_made_up_for_other_models() -> None:
    with raises(ConfigError, "nothing-to-simulate", "equal:8", "--feed-forward-s", "--backprop-s"):
        paper_profile(read_workload("equal:8"))


def test_every_network_of_the_paper_has_a_preset() -> None:
    assert set(CLAIMS) == {network.name for network in PRESETS} and len(MODELS) == 5


@pytest.mark.parametrize(("network", "model"), [*product(PRESETS, ("resnet50", "bert_base"))])
def test_overlap_is_within_its_limit_and_the_parts_make_the_whole(
    network: Network, model: str
) -> None:
    profile = paper_profile(read_workload(model))
    for fused, methods in ((False, unfused_methods()), (True, fused_methods())):
        gain = PaperGain(compare(profile, network, WORLD_SIZE, methods), fused)
        assert 1 <= gain.overlap <= gain.most_overlap == pytest.approx(1.25)
        assert gain.factor == pytest.approx(gain.overlap * gain.start_up * gain.rest)
        # One in flight, as in the paper: DeAR is no faster than its own bound.
        assert gain.dear.iteration_s >= gain.dear.timeline.dear_bound_s * (1 - 1e-9)
        # Without latency there is no start-up to lose anything to.
        at_once = replace(network.costs, reduce_scatter=RATE, all_gather=RATE)
        free = compare(profile, replace(network, costs=at_once), WORLD_SIZE, methods)
        assert PaperGain(free, fused).start_up == 1
        # Without fusion all start up equally often, so that nothing but overlap can be gained.
        if not fused:
            assert gain.factor <= gain.most_overlap


def test_bytescheduler_cuts_tensors_as_the_authors_had_it() -> None:
    (method,) = [one for one in unfused_methods() if one.name == "bytescheduler"]
    costs = PRESETS[0].at(WORLD_SIZE)
    setup = method.build(paper_profile(read_workload("bert_base")), costs, None)
    largest = max(placed.spec.numel for bucket in setup.layout for placed in bucket.placements)
    assert 3_900_000 < largest <= 4_000_000
