"""A run on all ranks: what it computes, and that all of them end it together."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dearmpi.cli.rank_log import rank_log
from dearmpi.cli.session import run_session
from dearmpi.comm.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.errors import MismatchError, NonFiniteLossError
from dearmpi.train import checkpoint, metrics
from dearmpi.train.agreement import AgreedError
from dearmpi.train.checkpoint import part_file
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import Part
from dearmpi.train.data import BatchPlan
from dearmpi.train.layers import make_layer
from dearmpi.train.seeding import seed_all
from dearmpi.train.stop import EXIT_PREEMPTED, StopRequest

NUM_SAMPLES, BATCH_SIZE = 43, 10  # the last of five batches holds 3: some ranks may have none

TASK = f"""
import signal
from pathlib import Path

import torch
from torch import nn

import dearmpi
from dearmpi.train.task import Task


class Points:
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum().sin().reshape(1)


def make_model(dropout):
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, 1),
    )


def make(options):
    # What goes wrong goes wrong on the last rank.
    world = dearmpi.connect()
    wrong = options.get("wrong", "")
    if world.rank != world.size - 1:
        wrong = ""
    stopped = Path(__file__).with_name("stopped")
    if wrong == "build":
        raise ValueError("this rank has no memory")
    steps = [0]

    def loss(model, batch):
        steps[0] += model.training
        value = nn.functional.mse_loss(model(batch[0]), batch[1])
        if model.training and steps[0] == 3:
            if wrong == "nan":
                value = value * float("nan")
            if wrong == "stop" and not stopped.exists():
                stopped.touch()
                signal.raise_signal(signal.SIGTERM)
        return value

    return Task(
        "points",
        make_model(float(options.get("dropout", "0"))),
        Points({NUM_SAMPLES}),
        loss,
        eval_data=Points(11),
        metrics=lambda model, batch: {{"ones": float(len(batch[0]))}},
        summarize=lambda model: ["the closing line"],
    )
"""


@pytest.fixture
def folder(world: World, shared_tmp_path: Path) -> Iterator[Path]:
    """A folder with the task in it, the same on all ranks."""
    if world.is_root:
        (shared_tmp_path / "points.py").write_text(TASK)
    world.barrier()
    threads = torch.get_num_threads()
    yield shared_tmp_path
    torch.set_num_threads(threads)


def run(world: World, folder: Path, name: str, **given: object) -> int:
    values = {
        "task": f"{folder / 'points.py'}:make",
        "run_folder": str(folder / "runs"),
        "name": name,
        "batch_size": BATCH_SIZE,
        "optimizer": "SGD",
        "lr": 0.2,
        "momentum": 0.9,
        "max_steps": 12,
        "precision": "fp64",
        "bucket_cap_mb": 0.0005,
        **given,
    }
    with rank_log(speaks=world.is_root) as log, StopRequest() as stop:
        layer = make_layer("flag", values)
        return run_session(world, [layer], stop=stop, log=log, command=["dear-train", "run"])


def saved_model(folder: Path, name: str, step: int) -> dict[str, Tensor]:
    return checkpoint.load(folder / "runs" / name / "checkpoints" / f"step-{step:08d}").model


def plain_training(num_steps: int, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same training without dearmpi: whole batches, one process."""
    names: dict[str, object] = {"__name__": "points"}
    exec(compile(TASK, "points.py", "exec"), names)
    seed_all(0)
    model: nn.Module = names["make_model"](0.0).to(dtype)  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plan = BatchPlan(NUM_SAMPLES, BATCH_SIZE, world_size=1, rank=0)
    generator = torch.Generator().manual_seed(NUM_SAMPLES)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator).to(dtype)
    targets = torch.stack([row.float().sum().sin().to(dtype).reshape(1) for row in inputs])
    for step in range(num_steps):
        indices = list(plan.step(*divmod(step, plan.steps_per_epoch))[0].indices)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        torch.autograd.backward(loss)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"schedule": "serial", "reduce_scatter": "native"},
        {"schedule": "wfbp", "gather": "gradients"},
        {"gradient_accumulation_steps": 2, "reduce_scatter": "exchange"},
        {"on_nan": "skip", "log_interval": 1},
        {"max_grad_norm": 1e6, "window": 1},
    ],
    ids=["dear", "serial", "wfbp", "accumulation", "skip", "clipping"],
)
def test_any_number_of_ranks_trains_what_one_process_trains(
    world: World, folder: Path, given: dict[str, object]
) -> None:
    assert run(world, folder, "a", **given) == 0
    expected = plain_training(12, dtype=torch.float64)
    found = saved_model(folder, "a", 12)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_rank_0_writes_and_speaks_for_all(
    world: World, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(world, folder, "a", log_interval=5) == 0
    world.barrier()
    told = capfd.readouterr().out
    assert ("the closing line" in told) == ("run folder:" in told) == world.is_root
    rows = metrics.read(folder / "runs" / "a")
    assert [row.step for row in rows] == [5, 10, 12]
    assert all(row.extra == {"ones": 1.0} for row in rows)  # each held-out sample once
    environment = json.loads((folder / "runs" / "a" / "env.json").read_text())
    assert environment["world_size"] == world.size
    log = (folder / "runs" / "a" / "logs" / f"rank-{world.rank:05d}.log").read_text()
    assert f"rank {world.rank} of {world.size}" in log


def test_a_run_stopped_on_one_rank_resumes_bit_by_bit(world: World, folder: Path) -> None:
    noisy = {"precision": "fp32", "optimizer": "AdamW", "momentum": None, "lr": 0.01}
    options = ["dropout=0.2"]
    assert run(world, folder, "whole", task_options=options, **noisy) == 0
    stopped = run(world, folder, "a", task_options=[*options, "wrong=stop"], **noisy)
    assert stopped == EXIT_PREEMPTED
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000004\n"
    resumed = run(world, folder, "a", task_options=[*options, "wrong=stop"], resume="auto", **noisy)
    assert resumed == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_clock_stops_all_ranks_at_one_step_and_resume_has_time_of_its_own(
    world: World, folder: Path
) -> None:
    assert run(world, folder, "whole") == 0
    # It is up at once, which all learn with the totals of the first step, one step later.
    assert run(world, folder, "a", max_time_s="1e-6s") == EXIT_PREEMPTED
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000002\n"
    assert run(world, folder, "a", resume="auto") == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_one_process_goes_on_where_many_ranks_stopped(world: World, folder: Path) -> None:
    run(world, folder, "a", max_steps=7, momentum=0.9)
    world.barrier()
    if world.is_root:
        alone = World(AloneCollectives(), progress="poll")
        assert run(alone, folder, "a", resume="auto", max_steps=12) == 0
        alone.close()
        found = saved_model(folder, "a", 12)
        for name, tensor in plain_training(12, dtype=torch.float64).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    world.barrier()


def test_a_loss_that_is_nan_on_one_rank_ends_all_at_the_same_step(
    world: World, folder: Path
) -> None:
    with pytest.raises(NonFiniteLossError, match=f"step 3 is not finite on 1 of {world.size}"):
        run(world, folder, "a", task_options=["wrong=nan"], checkpoint_interval=1)
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000002\n"


def test_a_nan_on_one_rank_can_be_left_out_on_all(world: World, folder: Path) -> None:
    assert run(world, folder, "a", task_options=["wrong=nan"], on_nan="skip", log_interval=1) == 0
    world.barrier()
    losses = [row.loss for row in metrics.read(folder / "runs" / "a")]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [3]


def test_a_task_that_one_rank_cannot_build_ends_all_and_leaves_nothing(
    world: World, folder: Path
) -> None:
    with pytest.raises(AgreedError, match="this rank has no memory") as caught:
        run(world, folder, "a", task_options=["wrong=build"])
    assert (f"rank {world.size - 1} on " in str(caught.value)) == (world.size > 1)
    world.barrier()
    assert not (folder / "runs").exists()


@pytest.mark.ranks(at_least=2)
def test_other_arguments_on_one_rank_end_all_with_both_values(world: World, folder: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        run(world, folder, "a", lr=0.1 if world.rank == 1 else 0.2)
    assert "argument lr differs: 0.2 on rank" in str(caught.value)
    assert "0.1 on rank 1" in str(caught.value)


@pytest.mark.ranks(at_least=2)
def test_another_model_on_one_rank_ends_all(world: World, folder: Path) -> None:
    own = folder / f"points-{world.rank}" / "points.py"
    own.parent.mkdir()
    own.write_text(TASK.replace("nn.Linear(6, 16)", "nn.Linear(6, 16, bias=False)"))
    own.write_text(TASK if world.rank else own.read_text())
    world.barrier()
    before = Path.cwd()
    os.chdir(own.parent)
    try:
        with pytest.raises((MismatchError, AgreedError), match="model shapes differs"):
            run(world, folder, "a", task="points.py:make")
    finally:
        os.chdir(before)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("others", ["have none", "have another of that name"])
def test_hosts_that_do_not_share_the_run_folder_end_all(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    own = folder / f"disk-{min(world.rank, 1)}"
    if others == "have none":
        own.mkdir(exist_ok=True)
    else:
        (own / "runs" / "a" / "checkpoints").mkdir(parents=True, exist_ok=True)
    world.barrier()
    monkeypatch.chdir(own)
    with pytest.raises(AgreedError, match="not the folder of that name that rank 0") as caught:
        run(world, folder, "a", run_folder="runs", resume="auto")
    assert caught.value.exit_code == 2
    assert "rank 1 on " in str(caught.value) and "rank 0 on" in str(caught.value)
    assert f"{folder / 'disk-1' / 'runs' / 'a'} is not" in str(caught.value)
    world.barrier()
    assert not list(own.glob("runs/a/.seen-*"))


@pytest.mark.ranks(at_least=2)
def test_a_checkpoint_that_only_rank_0_sees_ends_all(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(world, folder, "a", max_steps=2) == 0
    world.barrier()
    own = folder if world.is_root else folder / "elsewhere"
    own.mkdir(exist_ok=True)
    monkeypatch.chdir(own)
    with pytest.raises(AgreedError, match="is no folder here, but rank 0") as caught:
        run(world, folder, "a", run_folder="runs", resume="auto")
    assert caught.value.exit_code == 6


def test_checkpoints_that_only_some_ranks_can_read_end_all(world: World, folder: Path) -> None:
    run(world, folder, "a")
    world.barrier()
    path = folder / "runs" / "a"
    if world.is_root:
        tensors = path / "checkpoints" / "step-00000012" / "part-00000.safetensors"
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    world.barrier()
    with pytest.raises(AgreedError, match="is corrupted") as caught:
        run(world, folder, "b", resume=str(path), max_steps=20)
    assert caught.value.exit_code == 6
    world.barrier()
    assert not (folder / "runs" / "b").exists()


def test_a_full_disk_ends_all_and_the_checkpoint_before_stays_good(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = part_file.write_part

    def fill_up(path: Path, part: Part) -> FileRecord:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, part)

    monkeypatch.setattr(part_file, "write_part", fill_up)
    with pytest.raises(AgreedError, match="the disk is full") as caught:
        run(world, folder, "a", checkpoint_interval=2)
    assert caught.value.exit_code == 6
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000002\n"
    assert saved_model(folder, "a", 2)
