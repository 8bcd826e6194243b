"""Training on all ranks equals training in one process, whatever is combined with what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest

from dearmpi.comm.world import World
from tests.combinations import pairs_of, pairwise, turns_of
from tests.mpi.oracle import (
    OPTIMIZERS,
    REDUCE_SCATTERS,
    Case,
    Training,
    assert_equal_on_all_ranks,
    assert_trains_as_one_process,
    copies,
    fingerprint,
    flat_state,
    train,
)

ONE_TENSOR, SOME, ALL = 1e-6, 0.0005, 1.0
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name not in ("muon", "adafactor"))
FACTORS: dict[str, tuple[Any, ...]] = {
    "optimizer": ELEMENTWISE,
    "model": ("dense", "branches", "text", "image"),
    "schedule": ("dear", "wfbp", "serial"),
    "gather": ("parameters", "gradients"),
    "reduce_scatter": REDUCE_SCATTERS,
    "cap_mb": (SOME, ONE_TENSOR, ALL),
    "groups": (1, 3),
    "scheduler": ("none", "lambda", "onecycle", "plateau"),
    "micro_batches": (1, 3),
    "window": (2, 1),
    "extra": ("none", "clip", "clip to the largest", "eager"),
}


def case_of(extra: str, **fields: Any) -> Case:
    case = Case(**fields)
    if case.optimizer == "asgd" and case.scheduler == "onecycle":
        case = replace(case, scheduler="lambda")
    if extra == "eager":
        return replace(case, eager=True)
    return replace(case, clip={"clip": 2.0, "clip to the largest": float("inf")}.get(extra))


def name_of(case: Case) -> str:
    return "-".join(str(value) for value in astuple(case))


COVERING = [case_of(**values) for values in pairwise(FACTORS)]


@pytest.mark.parametrize("case", COVERING, ids=name_of)
def test_training_equals_one_process(case: Case, world: World) -> None:
    assert_trains_as_one_process(case, world)


# What differs with the number of ranks: how buckets are cut, and what travels when.
COVERING_OF_RANKS = [
    case_of(**values)
    for values in pairwise(
        {
            "optimizer": ("adamw", "sgd"),
            "model": ("branches", "dense"),
            **{
                name: FACTORS[name]
                for name in ("schedule", "gather", "reduce_scatter", "cap_mb", "window", "extra")
            },
        }
    )
]


@pytest.mark.parametrize("case", COVERING_OF_RANKS, ids=name_of)
def test_training_equals_one_process_on_any_number_of_ranks(case: Case, world: World) -> None:
    assert_trains_as_one_process(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("cap_mb", [ONE_TENSOR, SOME, ALL])
@pytest.mark.parametrize("reduce_scatter", REDUCE_SCATTERS)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("model", ["dense", "branches"])
def test_training_equals_one_process_in_full(
    model: str,
    optimizer: str,
    schedule: str,
    gather: str,
    reduce_scatter: str,
    cap_mb: float,
    world: World,
) -> None:
    case = Case(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        gather=gather,
        reduce_scatter=reduce_scatter,
        cap_mb=cap_mb,
        groups=3,
    )
    assert_trains_as_one_process(case, world)


# Not RMSprop by centered squares, which divides by variances near zero: rounding errors of single
# precision stand out there.
@pairs_of(
    optimizer=("sgd", "adagrad", "nesterov", "adam", "adamw"),
    reduce_scatter=REDUCE_SCATTERS,
    schedule=("dear", "wfbp", "serial"),
)
def test_single_and_mixed_precision(
    optimizer: str, reduce_scatter: str, schedule: str, world: World
) -> None:
    model = "mixed" if optimizer == "nesterov" else "single"
    gather = "gradients" if optimizer == "sgd" else "parameters"
    case = Case(
        model=model,
        optimizer=optimizer,
        gather=gather,
        reduce_scatter=reduce_scatter,
        schedule=schedule,
    )
    assert_trains_as_one_process(case, world)


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_tensors_gather_gradients(
    optimizer: str, schedule: str, world: World
) -> None:
    case = Case(model="matrices", optimizer=optimizer, schedule=schedule, gather="gradients")
    assert_trains_as_one_process(case, world)


def test_caps_make_one_some_and_many_buckets(world: World) -> None:
    """What the cases above rely on."""
    counts = []
    for cap_mb in (ALL, SOME, ONE_TENSOR):
        with Training(Case(cap_mb=cap_mb), world) as training:
            counts.append(len(training.optimizer.layout))
    assert counts[0] == 1 < counts[1] < counts[2] == len(list(training.model.parameters()))


@pytest.fixture(scope="module")
def polling_world() -> Iterator[World]:
    """A second world over the same ranks, whose progress is made between layers."""
    from dearmpi.comm.backends import mpi

    world = World(mpi.connect(), progress="poll")
    yield world
    world.close()


@pairs_of(
    model=("dense", "text", "branches"),
    schedule=("dear", "wfbp", "serial"),
    extra=("none", "clip", "eager"),
)
def test_progress_between_layers(
    model: str, schedule: str, extra: str, polling_world: World
) -> None:
    case = case_of(
        extra,
        model=model,
        optimizer="adamw",
        schedule=schedule,
        gather="gradients" if model == "text" else "parameters",
        micro_batches=2,
        scheduler="lambda",
    )
    assert_trains_as_one_process(case, polling_world)


@turns_of(schedule=("dear", "wfbp", "serial"), reduce_scatter=REDUCE_SCATTERS)
def test_the_same_run_twice_is_the_same_bit_by_bit(
    schedule: str, reduce_scatter: str, world: World
) -> None:
    case = Case(
        model="branches",
        optimizer="adam",
        schedule=schedule,
        reduce_scatter=reduce_scatter,
        groups=3,
        clip=2.0,
    )
    one, other = (train(case, world) for _ in range(2))
    assert fingerprint(one.parameters) == fingerprint(other.parameters)
    assert fingerprint(flat_state(one.optimizer)) == fingerprint(flat_state(other.optimizer))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("model", ["text", "image", "branches", "mixed"])
def test_ranks_have_equal_parameters_after_every_step(
    model: str, gather: str, world: World
) -> None:
    seen = []
    with Training(Case(model=model, optimizer="adam", gather=gather), world) as training:
        for step in range(3):
            training.step(step)
            assert_equal_on_all_ranks(copies(training.model), world)
            seen.append(fingerprint(copies(training.model)))
    assert len(set(seen)) == 3  # and each step changed something


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_automatic_choice_of_the_reduce_scatter(gather: str, world: World) -> None:
    case = Case(optimizer="adam", reduce_scatter="auto", gather=gather)
    assert_trains_as_one_process(case, world)
