"""The method ``local``: its options, and how far parameters come by it."""

from __future__ import annotations

import pytest

from dearmpi.bench.comparison import Length, compare_methods
from dearmpi.bench.method_names import read_method
from dearmpi.bench.result import Result
from dearmpi.bench.workload_model import ReplayedModel
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.plan.data.local_schedule import LocalSchedule, OuterRule
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from tests.codes import raises
from tests.fakes.ranks import run_ranks

PROFILE = profile_workload(read_workload("equal:1:4"), feed_forward_s=1e-4, backprop_s=2e-4)


def measure(text: str, *, num_batches: int) -> Result:
    length = Length(num_warmup=1, num_batches=num_batches, num_rounds=1)

    def rank(world: World) -> Result:
        model = ReplayedModel(PROFILE, batch_size=8, rank=world.rank, world_size=world.size)
        return compare_methods(
            world, model, [read_method(text)], length=length, tell=lambda line: None
        )

    return run_ranks(2, rank)[0]


@pytest.mark.parametrize(
    "text",
    [
        "local:sync_every=4",
        "local:0.2:sync_every=6:fragments=3:delay=1:mix=0.5:compress=int8",
        "local:0.2:sync_every=6:fragments=2:delay=2:mix=0.5:compress=int4",
        "local:sync_every=4:outer_lr=0.7:outer_momentum=0.9",
    ],
)
def test_local_steps_are_measured_and_checked(text: str) -> None:
    result = measure(text, num_batches=12)
    assert not result.problems()
    assert len(set(result.rows[0].totals())) == 1  # each iteration counts as the mean


def test_a_round_has_whole_periods() -> None:
    (problem,) = measure("local:sync_every=5", num_batches=12).problems()
    assert "12" in problem and "multiple of 5" in problem


def test_progress_of_averages_is_that_of_the_last_exchange() -> None:
    assert OuterRule(1.0, 0.0, 0.0).progress(LocalSchedule(5), 0, 14) == 10
    late = LocalSchedule(6, 2, 2)
    assert OuterRule(1.0, 0.0, 0.5).progress(late, 0, 13) == 6 + 5  # a step of six is mixed away
    assert OuterRule(1.0, 0.0, 0.5).progress(late, 1, 2) == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("sync_every=0", "out-of-range"),
        ("sync_every=x", "malformed-value"),
        ("fragments=9", "settings-contradict"),
        ("period=3", "unknown-method-option"),
        ("compress=int3", "unknown-choice"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: str, code: str) -> None:
    with raises(ConfigError, code):
        read_method(f"local:{options}")
