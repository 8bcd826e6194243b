"""Scripts that must end on several ranks as with plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import Case, Training, assert_same

Script = Callable[[Training], None]

_SLOW = (("wfbp", "gradients"), ("serial", "parameters"))  # both gathers with DeAR's schedule
EVERY_WAY = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(schedule=schedule, gather=gather, optimizer="adamw", groups=2),
            id=f"{schedule}-{gather}",
            marks=pytest.mark.slow if (schedule, gather) in _SLOW else (),
        )
        for schedule in ("dear", "wfbp", "serial")
        for gather in ("parameters", "gradients")
    ],
)


def assert_same_as_alone(script: Script, case: Case, size: int = 2) -> None:
    """``script`` on ``size`` ranks ends as it does in one process with plain torch."""
    alone = Training(case)
    script(alone)

    def rank(world: World) -> Any:
        with Training(case, world) as training:
            script(training)
            return training.outcome()

    for outcome in run_ranks(size, rank):
        assert_same(outcome, alone.outcome())
