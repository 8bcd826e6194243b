"""A script with a loop of its own and ``dearmpi.Run``: stopped, resumed on other ranks, refused."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dearmpi
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.errors import ArgumentError, ConfigError, MismatchError, NonFiniteLossError, UsageError
from dearmpi.report.page.report import write_report
from dearmpi.report.read.trace import read_traces
from dearmpi.train.checkpoint.inspection import export
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.stop import StopRequest
from dearmpi.train.run.balance import Balance
from dearmpi.train.run.tracing import trace_next_optimizer
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.forks import forked
from tests.job import Ended, run_job

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, STOP_AT, BATCH_SIZE = 24, 9, 12
SCRIPT = f"""
import os
import signal
import sys

import torch
from torch import nn

import dearmpi

folder, stop_at = sys.argv[1], int(sys.argv[2])
world = dearmpi.connect()
torch.manual_seed(0)
inputs = torch.randn(50, 6, dtype=torch.float64)  # four steps of twelve to an epoch
targets = inputs.sum(dim=1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
inner = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = dearmpi.DistributedOptimizer(inner, model, bucket_cap_mb=1e-3)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 12], gamma=0.5)

with dearmpi.Run(
    folder, model, optimizer, states={{"scheduler": scheduler}}, log_interval=4, trace=(3, 6)
) as run:
    run.resume()
    sampler = run.sampler(len(inputs), batch_size={BATCH_SIZE}, num_steps={NUM_STEPS})
    for indices in sampler:
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss, rate=scheduler.get_last_lr()[0])
        if run.step == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if run.should_stop:
            break
if world.is_root:
    print("ended at", run.step)
"""


def run_script(folder: Path, *, ranks: int, stop_at: int = 0) -> Ended:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    command = forked([sys.executable, script, folder, str(stop_at)])
    ended = run_job(command, ranks=ranks, limit_s=120, environment={"PYTHONPATH": str(ROOT)})
    assert ended.left_over == 0
    return ended


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from dearmpi.train import checkpoint

    snapshot = checkpoint.load(checkpoint.resolve(folder))
    assert snapshot.step == NUM_STEPS
    state = {f"{n}/{k}": v for n, of in snapshot.optimizer.items() for k, v in of.items()}
    return snapshot.model | {name: torch.as_tensor(value) for name, value in state.items()}


def test_a_stopped_script_goes_on_with_the_same_numbers_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = run_script(whole, ranks=2)
    assert ended.returncode == 0 and f"ended at {NUM_STEPS}" in ended.output, ended.output
    stopped = run_script(parts, ranks=2, stop_at=STOP_AT)
    assert stopped.returncode == 75 and "ended at" not in stopped.output, stopped.output
    assert (parts / "latest").read_text().startswith("checkpoints/step-000000")
    resumed = run_script(parts, ranks=3)
    assert resumed.returncode == 0 and f"ended at {NUM_STEPS}" in resumed.output, resumed.output
    left, right = saved(whole), saved(parts)
    assert left.keys() == right.keys() and len(left) > 12
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=1e-10, atol=1e-12)
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").open()] for f in (whole, parts)]
    losses = [{row["step"]: row["loss"] for row in of} for of in rows]
    assert losses[0].keys() <= losses[1].keys()  # the stop wrote one more row
    assert losses[1][NUM_STEPS] == pytest.approx(losses[0][NUM_STEPS], rel=1e-9)
    assert rows[1][-1]["rate"] == 0.0125 and len(rows[1][-1]["rank_step_s"]) == 3
    assert write_report(whole, tmp_path / "page").page.exists()
    assert len(list((whole / "trace").iterdir())) == 2
    assert len(list((parts / "trace").iterdir())) == 2  # what the first part recorded


def train_in_shares(
    folder: Path, world: World, num_steps: int, shares: Any
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Parameters in the end, and how many samples of each step this rank had."""
    generator = torch.Generator().manual_seed(0)  # its own, since ranks are threads here
    inputs = torch.randn(50, 6, dtype=torch.float64, generator=generator)
    model = nn.Linear(6, 2).double()
    for param in model.parameters():
        nn.init.normal_(param, generator=generator)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=world)
    sizes = []
    with dearmpi.Run(folder, model, optimizer) as run:
        run.resume()
        sampler = run.sampler(50, batch_size=BATCH_SIZE, num_steps=num_steps, shares=shares)
        for indices in sampler:
            loss = sampler.weight(len(indices)) * model(inputs[indices]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)
            sizes.append(len(indices))
    optimizer.close()
    return {name: value.clone() for name, value in model.state_dict().items()}, sizes


@pytest.fixture
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are for the main thread."""
    monkeypatch.setattr(StopRequest, "__enter__", lambda self: self)
    monkeypatch.setattr(StopRequest, "__exit__", lambda *_: None)


@pytest.mark.usefixtures("_ranks_are_threads")
def test_shares_of_a_batch_change_no_number_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 computes twice as long for a sample, as far as the balance knows."""
    note = Balance.note

    def slower(balance: Balance, num_samples: int, own_s: float) -> bool:
        own = balance.batches
        size = own.shares.sizes(own.batch_size, own.world_size, 1)[own.rank]
        return note(balance, num_samples, size * (2.0 - own.rank))

    monkeypatch.setattr(Balance, "note", slower)

    def train(name: str, num_steps: int, shares: Any, size: int = 2) -> list[Any]:
        folder = tmp_path / name
        return run_ranks(size, lambda world: train_in_shares(folder, world, num_steps, shares))

    ((expected, _),) = train("alone", 30, "even", size=1)
    by_weight = train("weights", 30, [1, 5])
    assert [sizes for _, sizes in by_weight] == [[2] * 30, [10] * 30]
    first = train("auto", 25, "auto")
    assert [sizes for _, sizes in first] == [[6] * 21 + [4] * 4, [6] * 21 + [8] * 4]
    second = train("auto", 30, "auto")
    assert [sizes for _, sizes in second] == [[4] * 5, [8] * 5]
    for values, _ in (*by_weight, *second):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_ranks_are_threads")
def test_shares_that_cannot_be_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        for shares, code in (([1, 0], "out-of-range"), ([1], "settings-contradict")):
            with raises(ConfigError, code, "shares"):
                train_in_shares(tmp_path / code, world, 1, shares)
        with raises(MismatchError, "ranks-built-differently", "[1.0, 1.0]", "[1.0, 2.0]"):
            train_in_shares(tmp_path / "differ", world, 1, [1, 1 + world.rank])

    run_ranks(2, rank)


class Script:
    """A script of one rank."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1, dtype=dtype)
        world = dearmpi.World(AloneCollectives(), progress="poll")
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = dearmpi.DistributedOptimizer(
            inner,
            self.model,
            world=world,
            **settings,  # type: ignore[arg-type]
        )

    def run(self, folder: Path, **settings: object) -> dearmpi.Run:
        return dearmpi.Run(folder, self.model, self.optimizer, **settings)  # type: ignore[arg-type]

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = (
            self.model(torch.randn(4, 3).to(self.model.weight.dtype)).square().mean()
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"gather": "parameters"}),
        (torch.float32, {"gather": "gradients"}),
        (torch.bfloat16, {"master_weights": True}),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, settings: dict[str, object]
) -> None:
    whole, first, second = (Script(dtype, **settings) for _ in range(3))
    torch.manual_seed(1)
    for _ in range(6):
        whole.step()
    torch.manual_seed(1)
    for script, until in ((first, 3), (second, 6)):
        with script.run(tmp_path / "a") as run:
            run.resume()
            while run.step < until:
                run.log(script.step())
        torch.manual_seed(2)  # the checkpoint has the state to go on with
    for left, right in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_run_in_a_folder_that_holds_one_is_refused_until_it_resumes(tmp_path: Path) -> None:
    script = Script()
    with script.run(tmp_path / "a") as run:
        run.log(script.step())
    before = (tmp_path / "a" / "latest").read_text()
    with (
        raises(ConfigError, "run-folder-not-empty", "resume()"),
        script.run(tmp_path / "a") as run,
    ):
        run.log(script.step())
    assert (tmp_path / "a" / "latest").read_text() == before
    with script.run(tmp_path / "a") as run:
        assert run.resume() == run.step == 1


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    script = Script()
    with (
        raises(NonFiniteLossError, "not-finite", "step 3", "step 2"),
        script.run(tmp_path / "a") as run,
    ):
        for loss in (1.0, 2.0):
            script.step()
            run.log(loss)
        run.save()
        run.log(math.nan)
        run.log(1.0)
    assert (tmp_path / "a" / "latest").read_text() == "checkpoints/step-00000002\n"


def test_the_time_limit_stops_with_the_exit_code_of_a_preempted_run(tmp_path: Path) -> None:
    script = Script()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, script.run(tmp_path / "a", max_time_s=1e-9) as run:
        while not run.should_stop:
            run.log(script.step())
    assert ended.value.code == 75 and run.step <= 2
    assert (tmp_path / "a" / "latest").read_text() == f"checkpoints/step-{run.step:08d}\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_metrics_keep_their_names(tmp_path: Path) -> None:
    script = Script()
    with (
        raises(UsageError, "metrics-out-of-order", "accuracy"),
        script.run(tmp_path / "a") as run,
    ):
        run.log(1.0, accuracy=0.5)
        run.log(1.0)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ({"log_interval": 0}, "out-of-range"),
        ({"keep": 2.5}, "wrong-type"),
        ({"max_time_s": math.nan}, "out-of-range"),
        ({"max_time_s": -1.0}, "out-of-range"),
        ({"save_every_s": 0.0}, "out-of-range"),
        ({"trace": (3, 3)}, "out-of-range"),
        ({"trace": (3,)}, "out-of-range"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, numbers: dict[str, Any], code: str
) -> None:
    with raises(ConfigError, code, next(iter(numbers))):
        Script().run(tmp_path / "a", **numbers)


def test_metrics_of_numpy_and_torch_come_back_as_numbers(tmp_path: Path) -> None:
    script = Script()
    values: list[Any] = [np.float64(0.5), np.float32(0.25), torch.tensor(0.125), np.int64(3), True]
    with script.run(tmp_path / "a", log_interval=1) as run:
        for value in values:
            run.log(script.step(), accuracy=value)
        wrong: Any = [1.0]
        with raises(ArgumentError, "wrong-type", "accuracy is list"):
            run.log(1.0, accuracy=wrong)
    rows = metrics.read(tmp_path / "a")
    assert [row.extra["accuracy"] for row in rows] == [0.5, 0.25, 0.125, 3.0, 1.0]


def test_an_error_of_the_script_passes_and_frees_the_folder(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(ZeroDivisionError), script.run(tmp_path / "a") as run:
        run.log(script.step())
        raise ZeroDivisionError
    with script.run(tmp_path / "a") as run:
        assert run.resume() == 0


class Adversaries:
    """A script of one rank with two networks, two optimizers and a moving average of one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)
        self.model = nn.ModuleDict({"one": self.one, "two": self.two})
        world = dearmpi.World(AloneCollectives(), progress="poll")
        self.optimizers = [
            dearmpi.DistributedOptimizer(
                torch.optim.AdamW(self.one.parameters(), lr=0.05), self.one, world=world
            ),
            dearmpi.DistributedOptimizer(
                torch.optim.SGD(self.two.parameters(), lr=0.1, momentum=0.9),
                self.model,
                world=world,
            ),
        ]
        self.average = torch.optim.swa_utils.AveragedModel(
            self.one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.two(self.one(torch.randn(4, 3)).tanh()).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.optimizers[0].synchronize()
        self.average.update_parameters(self.one)
        return loss

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *self.average.state_dict().values()]


def test_several_optimizers_and_a_moving_average_go_on_bit_by_bit(tmp_path: Path) -> None:
    whole, first, second = (Adversaries() for _ in range(3))
    torch.manual_seed(1)
    for _ in range(6):
        whole.step()
    torch.manual_seed(1)
    for script, until in ((first, 3), (second, 6)):
        states = {"average": script.average}
        with dearmpi.Run(tmp_path / "a", script.model, script.optimizers, states=states) as run:
            run.resume()
            while run.step < until:
                run.log(script.step())
        torch.manual_seed(2)
    assert int(second.average.n_averaged) == 6
    for left, right in zip(whole.tensors(), second.tensors(), strict=True):
        assert torch.equal(left, right)
    export(tmp_path / "a", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt").keys() == second.model.state_dict().keys()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    script = Adversaries()
    with (
        raises(AgreedError, "parameters-not-in-model"),
        dearmpi.Run(tmp_path / "a", script.two, script.optimizers) as run,
    ):
        run.log(script.step())


PLAIN = """
import sys

import torch

import dearmpi

world = dearmpi.connect()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = dearmpi.DistributedOptimizer(inner, model)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_no_optimizer_or_no_loss_is_refused_with_what_to_give(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (inner, [inner], []):
        with raises(ConfigError, "wrong-type", "DistributedOptimizer(optimizer, model)"):
            dearmpi.Run(tmp_path / "a", model, wrong)
    optimizer = dearmpi.DistributedOptimizer(inner, model)
    wrong_losses: list[Any] = ["x", torch.ones(2), None]
    with dearmpi.Run(tmp_path / "a", model, optimizer) as run:
        for wrong in wrong_losses:
            with raises(ArgumentError, "wrong-type", "give run.log"):
                run.log(wrong)
        assert run.step == 0


@pytest.mark.parametrize(("num_steps", "expected"), [(9, {3, 4, 5}), (4, {3, 4}), (2, set())])
def test_a_script_is_traced_by_a_variable_alone(
    tmp_path: Path, num_steps: int, expected: set[int]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN)
    environment = {
        "PYTHONPATH": str(ROOT),
        "DEAR_TRACE": "3:6",
        "DEAR_TRACE_FOLDER": str(tmp_path / "traced"),
    }
    command = forked([sys.executable, script, str(num_steps)])
    ended = run_job(command, ranks=2, limit_s=120, environment=environment)
    assert ended.returncode == 0, ended.output
    if not expected:
        assert "DEAR_TRACE is 3:6, but the script took 2 steps" in ended.output
        return
    assert f"iterations 3 to {max(expected)} are recorded in" in ended.output
    traces = read_traces(tmp_path / "traced").traces
    assert len(traces) == 2
    for trace in traces:
        forwards = [event for event in trace.events if str(event["name"]).startswith("F ")]
        assert {event["args"]["iteration"] for event in forwards} == expected
    if num_steps == 9:
        page = write_report(tmp_path / "traced", tmp_path / "page").page
        assert page.exists()


def test_a_run_that_traces_takes_over_from_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEAR_TRACE", "3:6")
    monkeypatch.setenv("DEAR_TRACE_FOLDER", str(tmp_path / "traced"))
    trace_next_optimizer()
    script = Script()
    with script.run(tmp_path / "run", trace=(3, 6)) as run:
        run.resume()
        for _ in range(9):
            run.log(script.step())
    (trace,) = read_traces(tmp_path / "run").traces
    spans = Counter(
        (event["args"]["iteration"], event["name"]) for event in trace.events if event["ph"] == "X"
    )
    assert {iteration for iteration, _ in spans} == {3, 4, 5}
    assert set(spans.values()) == {1}, spans
