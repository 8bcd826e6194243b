"""Signals by the hundred a second: handlers read the model, and the numbers stay as they are."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
import torch

from dearmpi.comm.world import World
from tests.mpi.oracle import Case, Training, assert_same

SECONDS_BETWEEN = 0.003


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_handlers_that_read_the_model_change_no_number(gather: str, world: World) -> None:
    case = Case(optimizer="adam", cap_mb=1e-6, gather=gather)
    num_read = num_under_way = 0
    with Training(case, world) as training:

        def read(_: int, __: FrameType | None) -> None:
            nonlocal num_read, num_under_way
            if num_under_way == 3:
                return  # a busy machine brings signals faster than it reads
            num_under_way += 1
            try:
                state = training.model.state_dict()
                assert all(bool(torch.isfinite(value).all()) for value in state.values())
                num_read += 1
            finally:
                num_under_way -= 1

        before = signal.signal(signal.SIGALRM, read)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN, SECONDS_BETWEEN)
        try:
            for step in range(40):
                training.step(step)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        outcome = training.outcome()
    plain = Training(case)
    for step in range(40):
        plain.step(step)
    assert_same(outcome, plain.outcome())
    assert num_read > 0
