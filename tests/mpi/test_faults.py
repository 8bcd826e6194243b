"""Nothing that is in flight may be freed, moved or forgotten; and failures end all ranks."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dearmpi
from dearmpi.comm.world import World
from tests.combinations import turns_of
from tests.forks import forked
from tests.job import Ended, Job
from tests.mpi.oracle import REDUCE_SCATTERS, Case, Outcome, Training, assert_same, train

ROOT = Path(dearmpi.__file__).parents[1]
CASE = Case(model="dense", optimizer="adam", cap_mb=1e-6)


class Churn:
    """Takes and frees memory of the sizes in use, and so overwrites what is freed too early."""

    def __init__(self) -> None:
        self._sizes = sorted({p.numel() for p in Training(CASE).model.parameters()})

    def __call__(self) -> None:
        gc.collect()
        junk: list[Tensor] = []
        for _ in range(20):
            for size in self._sizes:
                for numel in (size, 2 * size, -(-size // 3) * 3, size + 1):
                    junk.append(torch.full((numel,), float("nan"), dtype=torch.float64))
        del junk


@turns_of(gather=["parameters", "gradients"], reduce_scatter=REDUCE_SCATTERS)
def test_buffers_in_flight_outlive_garbage_collection(
    gather: str, reduce_scatter: str, world: World
) -> None:
    case = Case(
        optimizer="adam", cap_mb=1e-6, gather=gather, reduce_scatter=reduce_scatter, window=8
    )
    churn = Churn()
    with Training(case, world) as training:
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            churn()
            training.optimizer.step()
            churn()
        outcome = training.outcome()
    with_plain_torch = Training(case)
    for step in range(3):
        with_plain_torch.step(step)
    assert_same(outcome, with_plain_torch.outcome())


@pytest.mark.parametrize("reduce_scatter", REDUCE_SCATTERS)
def test_a_script_may_drop_everything_in_the_middle_of_a_step(
    reduce_scatter: str, world: World
) -> None:
    """Model and optimizer go while their buffers are under way; the next training is unharmed."""
    case = Case(optimizer="adam", cap_mb=1e-6, reduce_scatter=reduce_scatter, window=8)
    churn = Churn()

    def begin_and_drop() -> None:
        training = Training(case, world)
        training.step(0)
        training.step(1)

    expected = train(case)
    for _ in range(2):
        begin_and_drop()
        churn()
        found: Outcome = train(case, world)
        assert_same(found, expected)


SCRIPT = """
import os, signal, sys, time
import torch
import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits

how = sys.argv[1]
keeps_waiting = how in ("freeze", "load", "leave")
world = dearmpi.connect(stall_limits=StallLimits(1.0, 3.0 if keeps_waiting else 60.0))
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = dearmpi.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_cap_mb=1e-6
)


def read_a_batch_that_never_comes():
    time.sleep(1000)


for step in range(1_000_000):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8)).square().mean()
    if step == 5 and world.rank == world.size - 1:
        print("now", flush=True)
        if how == "exit":
            os._exit(3)
        if how == "abort":
            world.abort(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "load":
            read_a_batch_that_never_comes()
        if how == "leave":
            break
        if how == "raise":
            raise ValueError("a mistake of one rank's own")
        if how == "raise in backward":
            loss.register_hook(lambda _: 1 / 0)
    loss.backward()
    optimizer.step()
"""
END_S = 10.0


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    yield path


def run(script: Path, how: str, ranks: int = 3) -> tuple[Ended, float]:
    """How the job ended, and how many seconds after the failure."""
    with Job(
        forked([sys.executable, script, how]),
        ranks=ranks,
        limit_s=120.0,
        environment={"PYTHONPATH": str(ROOT)},
    ) as job:
        assert job.wait_for("now", timeout_s=100.0), job.output()
        before_s = job.duration_s
        ended = job.wait()
        return ended, ended.duration_s - before_s


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "how",
    [
        "raise",
        "raise in backward",
        "abort",
        pytest.param("kill", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
    ],
)
def test_one_rank_that_fails_ends_the_job_in_time(how: str, script: Path) -> None:
    ended, seconds = run(script, how)
    assert ended.returncode not in (0, 124), ended.output
    assert seconds < END_S
    assert ended.left_over == 0
    if how == "abort":
        assert ended.returncode == 3
    if how.startswith("raise"):
        assert ended.returncode == 1
    if how == "raise":
        assert "[rank 2 on " in ended.output
        assert "ValueError: a mistake of one rank's own" in ended.output
    if how == "raise in backward":
        assert "[rank 2 on " in ended.output and "ZeroDivisionError" in ended.output


@pytest.mark.ranks(1)
def test_one_rank_killed_from_outside_ends_the_job_in_time(script: Path) -> None:
    with Job(
        forked([sys.executable, script, "none"]),
        ranks=3,
        limit_s=120.0,
        environment={"PYTHONPATH": str(ROOT)},
    ) as job:
        assert job.wait_for("now", timeout_s=100.0), job.output()
        before_s = job.duration_s
        job.signal_rank(1, signal.SIGKILL)
        ended = job.wait()
    assert ended.returncode not in (0, 124), ended.output
    assert ended.duration_s - before_s < END_S and ended.left_over == 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("freeze", "rank 2 on {host}: does not answer (stopped, or its host is"),
        pytest.param("load", "read_a_batch_that_never_comes", marks=pytest.mark.slow),
        pytest.param("leave", "rank 2 has ended after 5 backprops", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named_and_ends_the_job(
    how: str, told: str, script: Path
) -> None:
    ended, seconds = run(script, how)
    assert ended.returncode == 8, ended.output
    assert told.format(host=socket.gethostname()) in ended.output
    assert "waits" in ended.output and "script.py:" in ended.output
    assert seconds < 3.0 + END_S and ended.left_over == 0


BLOCKS_SCRIPT = """
import os, signal, sys
import torch
import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.engine.codec.largest import TopBlocks

world = dearmpi.connect(stall_limits=StallLimits(1.0, 3.0))
reduce, num_steps = TopBlocks.reduce, 0


def stop_before_the_values(self, *args, **kwargs):
    global num_steps
    steps, num_steps = reduce(self, *args, **kwargs), num_steps + 1
    yield next(steps)
    yield next(steps)
    if num_steps == 3 and world.rank == 1:
        print("now", flush=True)
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return (yield from steps)


TopBlocks.reduce = stop_before_the_values
model = torch.nn.Linear(300, 300)
optimizer = dearmpi.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, compress="block-topk"
)
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_ends_between_choosing_blocks_and_sending_them(how: str, script: Path) -> None:
    """Others have its choice, and wait for the values of the same bucket."""
    script.write_text(BLOCKS_SCRIPT)
    ended, seconds = run(script, how)
    assert ended.returncode not in (0, 124), ended.output
    assert seconds < 3.0 + END_S and ended.left_over == 0
    if how == "SIGSTOP":
        assert ended.returncode == 8
        assert "begun 3 backprops, waits" in ended.output and "bucket 0" in ended.output
        assert f"rank 1 on {socket.gethostname()}: does not answer" in ended.output


LONGER_SCRIPT = """
import torch
import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits

world = dearmpi.connect(stall_limits=StallLimits(0.5, 8.0))
model = torch.nn.Linear(8, 8)
optimizer = dearmpi.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(3 + (world.rank == 1)):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
print("now", flush=True)
"""


@pytest.mark.ranks(1)
def test_a_rank_that_takes_a_step_too_many_does_not_end_as_if_all_were_well(script: Path) -> None:
    """Nothing in the script waits for that step."""
    script.write_text(LONGER_SCRIPT)
    ended, seconds = run(script, "longer")
    assert ended.returncode == 8, ended.output
    assert "rank 1 has begun 4 backprops, waits" in ended.output
    assert "has ended after 3 backprops" in ended.output
    named = f"every rank has joined these operations of rank 1 on {socket.gethostname()}: RS0"
    assert named in ended.output
    assert seconds < 8.0 + END_S and ended.left_over == 0


END_SCRIPT = """
import os, signal
import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits

world = dearmpi.connect(stall_limits=StallLimits(0.5, 8.0))
from dearmpi.comm.backends import mpi
finalize = mpi.finalize


def stop_first():
    os.kill(os.getpid(), signal.SIGSTOP)
    finalize()


if world.rank == 1:
    mpi.finalize = stop_first
print("now", flush=True)
"""


@pytest.mark.ranks(1)
def test_a_rank_that_is_stopped_in_the_finalisation_ends_the_job(script: Path) -> None:
    script.write_text(END_SCRIPT)
    ended, seconds = run(script, "stop")
    assert ended.returncode in (8, signal.SIGKILL), ended.output
    host, what = socket.gethostname(), "gave up after waiting 8 s for the other ranks in MPI's"
    told = [f"[rank {rank} on {host}] {what}" for rank in (0, 2)]  # the first ends the job
    assert any(said in ended.output for said in told), ended.output
    assert seconds < 8.0 + END_S and ended.left_over == 0


START_SCRIPT = """
import os, signal

# Before any import: the others have not begun to wait then.
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    print("now", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits

dearmpi.connect(stall_limits=StallLimits(0.5, 2.0))
"""


@pytest.mark.ranks(1)
def test_a_rank_that_never_starts_mpi_ends_the_job(script: Path) -> None:
    script.write_text(START_SCRIPT)
    ended, seconds = run(script, "stop")
    assert ended.returncode in (8, signal.SIGKILL), ended.output
    host = socket.gethostname()
    told = [f"[rank {rank} on {host}] gave up after waiting 2 s for all 3 ranks" for rank in (0, 2)]
    assert any(said in ended.output for said in told), ended.output
    assert "[rank 1" not in ended.output
    assert seconds < 2.0 + END_S and ended.left_over == 0
