"""``compress="auto"``: what a job's first iterations lead to, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from dearmpi.engine.codec import timing
from dearmpi.engine.setup import self_planning
from dearmpi.engine.setup.codec_choice import CodecChoice, decide
from dearmpi.engine.setup.self_planning import NUM_PROFILED, NUM_WARMUP, JobMeasurement
from dearmpi.errors import ConfigError, MismatchError, UsageError
from dearmpi.local.sync_settings import choose_config
from dearmpi.plan.model import codec_cost
from dearmpi.plan.model.codec_cost import codec_bytes
from dearmpi.plan.model.cost import LinkModel
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies
from tests.unit.engine.test_compress import make_wide_model, regress

NUM_DENSE = NUM_WARMUP + NUM_PROFILED


@pytest.fixture(autouse=True)
def _all_is_small_and_short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in ((bucket, "_LEAST_COMPRESSED"), (codec_cost, "LEAST_COMPRESSED")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(timing, "_NUMEL", 1 << 16)
    monkeypatch.setattr(self_planning, "_MEASURING_S", 0.01)
    yield


@pytest.mark.parametrize(
    ("predicted", "taken"),
    [
        ({"fp32": 1.0, "bf16": 0.98, "int8": 0.96, "int4": 0.95}, "int8"),
        ({"fp32": 1.0, "bf16": 0.98, "int8": 1.2, "int4": 0.98}, "fp32"),
        ({"fp32": 1.0, "bf16": 0.6, "int8": 0.59, "int4": 0.5}, "int4"),
        ({"fp32": 0.0, "bf16": 0.0}, "bf16"),
        ({"fp32": 1.0}, "fp32"),
    ],
)
def test_what_loses_least_gives_way_for_three_percent(
    predicted: dict[str, float], taken: str
) -> None:
    name, _, reason = decide(predicted).partition("\n")
    assert name == taken and all(
        f"{one} {seconds:.3g} s" in reason for one, seconds in predicted.items()
    )


def make(world: World, model: nn.Module, **settings: Any) -> DistributedOptimizer:
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return DistributedOptimizer(inner, model, world=world, compress="auto", **settings)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_what_rank_0_predicts_is_taken_once(
    name: str, gather: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps are dense to the last bit; then the optimizer's state goes on."""

    def predict(self: CodecChoice, micro_batches: int) -> dict[str, float]:
        fastest = name if self._world.is_root else "bf16"
        return {one: 0.5 if one == fastest else 1.0 for one in ("fp32", "bf16", "int8", "int4")}

    monkeypatch.setattr(CodecChoice, "_predict", predict)

    def rank(world: World) -> tuple[Any, ...]:
        dense_model = make_wide_model()
        inner = torch.optim.Adam(dense_model.parameters(), lr=0.01)
        dense = DistributedOptimizer(inner, dense_model, world=world, gather=gather)
        expected = regress(dense_model, dense, world, steps=30)
        dense.close()
        model = make_wide_model()
        optimizer = make(world, model, gather=gather)
        assert optimizer.is_choosing and not optimizer.is_planning and not optimizer.codec_choice
        losses = regress(model, optimizer, world, steps=30)
        optimizer.synchronize()
        assert not optimizer.is_choosing
        config, traffic = optimizer.config, optimizer.traffic
        optimizer.close()
        share = (traffic.reduced + traffic.gathered) / traffic.dense
        return copies(model), losses, expected, config, share, optimizer.codec_choice

    found = run_ranks(2, rank)
    for model, losses, expected, config, share, line in found:
        assert all(torch.equal(value, found[0][0][key]) for key, value in model.items())
        assert losses[:NUM_DENSE] == expected[:NUM_DENSE]
        assert losses[-1] == pytest.approx(expected[-1], rel=0.2) and losses[-1] < 0.5 * losses[0]
        assert (config.compress, config.comm_dtype) == {
            "fp32": ("none", "fp32"),
            "bf16": ("none", "bf16"),
        }.get(name, (name, "fp32"))
        assert share == pytest.approx(
            {"fp32": 1, "bf16": 0.5, "int8": 0.26}.get(name, 0.15), rel=0.2
        )
        assert "compress auto" in line and name in line and line == found[0][-1]


@pytest.mark.parametrize(
    ("alpha_s", "beta_s", "taken"), [(1e-7, 1e-15, {"none"}), (1e-7, 1e-3, {"int8", "int4"})]
)
def test_a_link_decides(
    alpha_s: float, beta_s: float, taken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the layers' times as they are, and codecs as they compute here."""
    measure = JobMeasurement.measure

    def on_a_link(self: JobMeasurement, **given: Any) -> Any:
        measured, link = measure(self, **given), LinkModel(alpha_s, beta_s)
        costs = replace(measured.costs, reduce_scatter=link, all_gather=link)
        return measured._replace(costs=costs)

    monkeypatch.setattr(JobMeasurement, "measure", on_a_link)

    def rank(world: World) -> tuple[str, str]:
        model = make_wide_model()
        optimizer = make(world, model)
        regress(model, optimizer, world, steps=NUM_DENSE)
        optimizer.close()
        return optimizer.config.compress, optimizer.codec_choice

    found = run_ranks(2, rank)
    assert found[0] == found[1] and found[0][0] in taken, found
    assert all(f"{one} " in found[0][1] for one in ("fp32", "bf16", "int8", "int4"))


def test_without_layers_to_time_all_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: JobMeasurement, **given: Any) -> Any:
        raise UsageError("rank 1 cannot plan: for this test", code="rank-cannot-plan")

    monkeypatch.setattr(JobMeasurement, "measure", fail)

    def rank(world: World) -> tuple[EngineConfig, str]:
        model = make_wide_model()
        optimizer = make(world, model)
        regress(model, optimizer, world, steps=NUM_DENSE + 1)
        optimizer.close()
        return optimizer.config, optimizer.codec_choice

    for config, line in run_ranks(2, rank):
        assert config == EngineConfig() and "for this test" in line


def test_inside_join_all_stays_dense() -> None:
    def rank(world: World) -> tuple[EngineConfig, str]:
        model = make_wide_model()
        optimizer = make(world, model)
        with optimizer.join():
            regress(model, optimizer, world, steps=NUM_DENSE + world.rank)
        optimizer.close()
        return optimizer.config, optimizer.codec_choice

    for config, line in run_ranks(2, rank):
        assert config.compress == "none" and "unequal" in line


def test_one_rank_sends_nothing() -> None:
    def rank(world: World) -> tuple[EngineConfig, str]:
        optimizer = make(world, make_wide_model())
        assert not optimizer.is_choosing
        return optimizer.config, optimizer.codec_choice

    ((config, line),) = run_ranks(1, rank)
    assert config == EngineConfig() and "one rank" in line


def test_a_rank_without_it_is_noticed() -> None:
    def rank(world: World) -> Tensor | None:
        model = make_wide_model()
        inner = torch.optim.Adam(model.parameters())
        compress: Any = "auto" if world.is_root else "none"
        with raises(MismatchError, "ranks-differ-in-plan", "rank 1", "compress 'auto'"):
            DistributedOptimizer(inner, model, world=world, compress=compress)
        return None

    run_ranks(2, rank)


def test_what_cannot_be_chosen_is_refused() -> None:
    inner = torch.optim.SGD(make_wide_model().parameters(), lr=0.1)
    without_effect, contradicts = "setting-without-effect", "settings-contradict"
    refusals: list[tuple[str, Callable[[], object]]] = [
        (contradicts, lambda: codec_bytes("auto")),
        (contradicts, lambda: choose_config(EngineConfig(compress="auto"), None, inner)),
        (without_effect, lambda: EngineConfig(compress="auto", compress_after=3)),
        (contradicts, lambda: EngineConfig(compress="auto", comm_dtype="bf16")),
        (contradicts, lambda: RunSettings(task="digits", compress="auto", plan="bayes")),
        (contradicts, lambda: RunSettings(task="digits", compress="auto", deterministic=True)),
    ]
    for code, refused in refusals:
        with raises(ConfigError, code, "auto"):
            refused()


def test_a_resumed_run_begins_dense_and_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the owners' unrounded parameters, which the state has."""
    monkeypatch.setattr(
        CodecChoice, "_predict", lambda self, micro_batches: {"fp32": 1.0, "int4": 0.5}
    )

    def rank(world: World) -> tuple[Any, ...]:
        model = make_wide_model()
        optimizer = make(world, model)
        regress(model, optimizer, world, steps=12)
        assert optimizer.config.compress == "int4"
        state, values = optimizer.state_dict(), copies(model)
        optimizer.close()
        resumed_model = make_wide_model()
        resumed = make(world, resumed_model)
        resumed_model.load_state_dict(values)
        resumed.load_state_dict(state)
        assert resumed.is_choosing
        losses = regress(resumed_model, resumed, world, steps=12)
        resumed.synchronize()
        is_int4 = resumed.config.compress == "int4"
        resumed.close()
        return copies(resumed_model), losses, is_int4

    found = run_ranks(2, rank)
    for model, losses, is_int4 in found:
        assert is_int4 and losses[-1] < losses[0]
        assert all(torch.equal(value, found[0][0][key]) for key, value in model.items())
