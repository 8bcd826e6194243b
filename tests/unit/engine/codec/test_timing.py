"""What compression costs: measured between ranks, in training, and by its formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.config import Compress
from dearmpi.engine.bucket import bucket
from dearmpi.engine.codec import timing
from dearmpi.engine.codec.timing import measure_codec
from dearmpi.engine.setup import self_planning
from dearmpi.engine.setup.self_planning import JobMeasurement
from dearmpi.errors import ConfigError
from dearmpi.plan.model.codec_cost import CodecCost, codec_bytes
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.engine.test_compress import make_wide_model, regress

CHOICES: list[Compress] = ["int8", "int4", "random-block", "random-k", "topk", "block-topk"]


@pytest.mark.parametrize("compress", CHOICES)
def test_bytes_are_those_of_the_format(compress: Compress, monkeypatch: Any) -> None:
    monkeypatch.setattr(timing, "_NUMEL", 1 << 18)
    config = EngineConfig(compress=compress)
    found = run_ranks(2, lambda world: measure_codec(world, config))
    assert found[0] == found[1]
    known = codec_bytes(compress, config.density)
    assert found[0].reduced == pytest.approx(known.reduced, rel=0.1)
    assert found[0].gathered == pytest.approx(known.gathered, rel=0.02)
    assert found[0].density == known.density
    for seconds in (found[0].reduce_s_per_byte, found[0].gather_s_per_byte):
        assert 1e-12 < seconds < 1e-6


@pytest.mark.parametrize("compress", ["nonzero", "powersgd"])
def test_what_follows_from_gradients_is_refused(compress: Compress) -> None:
    with raises(ConfigError, "settings-contradict", compress, "plan 'auto'"):
        codec_bytes(compress)


@pytest.mark.parametrize(
    ("settings", "reduced"),
    [
        ({"compress": "none"}, None),
        ({"compress": "int8"}, 0.252),
        ({"compress": "random-k", "density": 0.1, "compress_after": 9}, 0.1),
        ({"compress": "nonzero"}, 1.0),
    ],
)
def test_the_first_steps_of_a_run_show_what_compression_costs(
    settings: dict[str, Any], reduced: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    monkeypatch.setattr(self_planning, "_MEASURING_S", 0.01)

    def rank(world: World) -> CodecCost | None:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world, **settings)
        built = optimizer._built
        measurement = JobMeasurement(
            built.spec, codecs=built.engine.codecs, waited=lambda: optimizer.waited_s
        )
        regress(model, optimizer, world, steps=5)
        optimizer.synchronize()
        costs = measurement.measure().costs
        measurement.detach()
        optimizer.close()
        return costs.codec

    for codec in run_ranks(2, rank):
        assert (codec is None) == (reduced is None)
        if codec is not None:
            assert codec.reduced == pytest.approx(reduced, rel=0.1)
            assert codec.reduce_s_per_byte > 0 and codec.gather_s_per_byte > 0


def test_what_is_decoded_counts_though_it_was_encoded_before_anyone_listened() -> None:
    def rank(world: World) -> float:
        model = make_wide_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world)
        built = optimizer._built
        measurement = JobMeasurement(
            built.spec, codecs=built.engine.codecs, waited=lambda: optimizer.waited_s
        )
        measurement.detach()
        measurement._coded_s["decode AG0"].append(2.0)
        measurement._coded_s["decode AG1"].append(1.0)
        optimizer.close()
        return measurement._codec_s("AG")

    assert run_ranks(2, rank) == [3.0, 3.0]
