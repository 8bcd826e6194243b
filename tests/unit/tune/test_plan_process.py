"""A plan made in another process: the same as here, or the same error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.search.planner import make_plan
from dearmpi.tune.plan_process import PlanProcess, PlanRequest, parse_request

LINK = LinkModel(1e-3, 8e-9, 0.9)
PROFILE = profile_workload(read_workload("equal:24:6"), feed_forward_s=0.1, backprop_s=0.2)
REQUEST = PlanRequest(
    PROFILE, Costs(4, LINK, LINK, update_s=1e-3), eager=True, gather="parameters", micro_batches=3
)


def test_the_plan_is_that_of_this_process() -> None:
    process = PlanProcess(REQUEST)
    plan = process.result()
    alone = make_plan(PROFILE, REQUEST.costs, world_size=4, eager=True)
    assert replace(plan, prediction=alone.prediction) == alone
    assert plan.prediction.compute_s == pytest.approx(0.9)
    assert plan.prediction.iteration_s == pytest.approx(alone.prediction.iteration_s + 0.6)
    assert plan.prediction.communication_s == alone.prediction.communication_s


@pytest.mark.parametrize(("longer", "stays"), [(1.0, True), (1.004, True), (1.006, False)])
def test_a_plan_must_gain_half_a_hundredth_from_what_is_in_use(longer: float, stays: bool) -> None:
    best = make_plan(PROFILE, REQUEST.costs, world_size=4, eager=True)
    seconds = longer * best.prediction.iteration_s
    standing = replace(
        best, origin="in use", prediction=replace(best.prediction, iteration_s=seconds)
    )
    plan = replace(REQUEST, micro_batches=1, standing=standing).carry_out()
    assert plan == (standing if stays else best)


def test_a_process_that_was_killed_is_no_loss() -> None:
    process = PlanProcess(REQUEST)
    assert process._process is not None
    process._process.kill()
    assert process.result() == REQUEST.carry_out()


def test_without_a_process_the_plan_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert PlanProcess(REQUEST).result() == REQUEST.carry_out()


def test_without_a_temporary_file_the_plan_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    process = PlanProcess(REQUEST)
    assert process.is_done() and process.result() == REQUEST.carry_out()
    process.close()


def test_what_cannot_be_planned_is_told() -> None:
    frozen = profile_workload(read_workload("equal:24:6"), feed_forward_s=0.1, backprop_s=0.2)
    layers = tuple(
        replace(layer, params=tuple(replace(spec, trained=False) for spec in layer.params))
        for layer in frozen.workload.layers
    )
    frozen = replace(frozen, workload=replace(frozen.workload, layers=layers))
    with pytest.raises(ConfigError, match="has no trained parameter"):
        PlanProcess(replace(REQUEST, profile=frozen)).result()


def test_a_request_survives_as_text() -> None:
    assert parse_request(REQUEST.to_json()) == REQUEST
    other = replace(REQUEST, standing=REQUEST.carry_out())
    assert parse_request(other.to_json()) == other
    codec = CodecCost("topk", 0.02, 0.25, 1e-9, 2e-9, density=0.01)
    other = replace(REQUEST, costs=replace(REQUEST.costs, codec=codec))
    assert parse_request(other.to_json()) == other


def test_closing_ends_the_process() -> None:
    process = PlanProcess(REQUEST)
    process.close()
    process.close()
    assert process._process is not None and process._process.returncode is not None
