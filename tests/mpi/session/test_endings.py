"""A run that goes wrong on one rank: all of them end it together, and say why."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dearmpi.comm.world import World
from dearmpi.errors import MismatchError, NonFiniteLossError
from dearmpi.train.checkpoint import store
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import CheckpointPart, write_part
from dearmpi.train.ranks.agreement import AgreedError
from tests.codes import raises
from tests.mpi.session.points import TASK, run, saved_model


def test_a_loss_that_is_nan_on_one_rank_ends_all_at_the_same_step(
    world: World, folder: Path
) -> None:
    with raises(NonFiniteLossError, "not-finite", "step 3", f"1 of {world.size}"):
        run(world, folder, "a", task_options=["wrong=nan"], checkpoint_interval=1)
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000002\n"


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
        told = r"model shapes differs: 3\.weight \(8, 16\) .* on rank 0 .*; 0\.bias \(16,\) "
        with pytest.raises((MismatchError, AgreedError), match=told):
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
    with raises(AgreedError, "run-folder-not-shared", "rank 0") as caught:
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
    with raises(AgreedError, "run-folder-not-shared", "rank 0") as caught:
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
    with raises(AgreedError, "checkpoint-damaged") as caught:
        run(world, folder, "b", resume=str(path), max_steps=20)
    assert caught.value.exit_code == 6
    world.barrier()
    assert not (folder / "runs" / "b").exists()


def test_a_full_disk_ends_all_and_the_checkpoint_before_stays_good(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_part

    def fill_up(path: Path, part: CheckpointPart) -> FileRecord:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, part)

    monkeypatch.setattr(store, "write_part", fill_up)
    with raises(AgreedError, "disk-full") as caught:
        run(world, folder, "a", checkpoint_interval=2)
    assert caught.value.exit_code == 6
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000002\n"
    assert saved_model(folder, "a", 2)
