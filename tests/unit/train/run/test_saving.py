"""Checkpoints are written by all ranks, beside training, and fit any number of ranks."""

from __future__ import annotations

import errno
import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.errors import NonFiniteLossError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import Snapshot, store
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import CheckpointPart, CopyBuffer, TensorPiece, write_part
from dearmpi.train.loop.job import Job, prepare
from dearmpi.train.loop.optimizers import choose_optimizer
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.saving import Saver, check_finite
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.task import Task
from tests.codes import raises
from tests.fakes.ranks import run_ranks

DATA = [(torch.full((1, 4, 4), i / 16), torch.tensor([i / 16])) for i in range(16)]
TIMEOUT_S = 60.0


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make_job(world: World, snapshot: Snapshot | None = None, **settings: Any) -> Job:
    seed_all(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.Tanh(),
        nn.Linear(3, 1),
    )
    chosen = RunSettings(**{"optimizer": "AdamW", "lr": 0.01, "batch_size": 8, **settings})
    task = Task("squares", model, DATA, squared_error)
    return prepare(world, chosen, task, choice=choose_optimizer(chosen), snapshot=snapshot)


@dataclass
class Notes:
    """A listener that remembers, in order."""

    events: list[str] = field(default_factory=list)

    def stepped(self, step: int) -> None:
        self.events.append(f"step {step}")

    def measured(self, row: MetricsRow) -> None:
        pass

    def saved(self, checkpoint: Path | None) -> None:
        self.events.append("saved" if checkpoint is None else checkpoint.name)

    def chose_interval(self, save_time_s: float, checkpoint_s: float) -> None:
        pass


def same(left: Any, right: Any) -> bool:
    """Equality of nested values with tensors in them, bit for bit."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


GATHERS = ["parameters", "gradients"]


@pytest.mark.parametrize("gather", GATHERS)
def test_state_survives_any_change_of_ranks_and_buckets(tmp_path: Path, gather: str) -> None:
    other = GATHERS[1 - GATHERS.index(gather)]
    # Ranks, what is gathered, bucket cap in MiB.
    stages = [(4, gather, 1e-4), (2, gather, 1e-3), (3, other, 5e-4), (1, gather, 1.0)]
    stages.append((4, gather, 2e-4))
    known = first_snapshot(tmp_path / "first", *stages[0])
    for number, (size, what, cap) in enumerate(stages[1:]):
        found = saved_again(tmp_path / str(number), known, size, what, cap)
        assert same(found.model, known.model)
        assert same(found.optimizer, known.optimizer)
        assert len(found.random) == size
        known = found


SHAMPOO = "pytorch_optimizer:Shampoo"


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor", "Muon", SHAMPOO])
def test_state_of_owners_survives_any_change_of_ranks(tmp_path: Path, optimizer: str) -> None:
    """Each rank writes what it has, with whatever shapes, or cut; others own it after a change."""
    if optimizer == SHAMPOO:
        pytest.importorskip("pytorch_optimizer", reason="an extra of the tests")
    keys = KEYS[optimizer]
    owned: dict[str, Any] = {"optimizer": optimizer, "shards": "whole"}
    known = first_snapshot(tmp_path / "first", 4, "parameters", 1e-4, keys=keys, **owned)
    for size, gather, cap in (
        (3, "parameters", 1e-3),
        (2, "gradients", 1e-4),
        (1, "parameters", 1),
    ):
        chosen = {**owned, "shards": "whole" if gather == "parameters" else "auto"}
        found = saved_again(tmp_path / str(size), known, size, gather, cap, **chosen)
        assert same(found.model, known.model) and same(found.optimizer, known.optimizer)
        known = found


ADAMW = {"step", "exp_avg", "exp_avg_sq"}
MATRICES = {f"{kind}_{dim}" for kind in ("pre_cond", "inv_pre_cond") for dim in range(4)}
KEYS = {  # of filters
    "AdamW": ADAMW,
    "Adafactor": {"step", "row_var", "col_var"},
    "Muon": ADAMW,
    SHAMPOO: {*MATRICES, "momentum_buffer"},
}


def first_snapshot(
    folder: Path, size: int, gather: str, cap_mb: float, keys: set[str] = ADAMW, **chosen: Any
) -> Snapshot:
    """What a run of three steps ends with."""
    folder.mkdir()

    def work(world: World) -> None:
        job = make_job(world, max_steps=3, gather=gather, bucket_cap_mb=cap_mb, **chosen)
        Trainer(job, folder, listener=Notes()).run()

    run_ranks(size, work)
    found = checkpoint.load(folder / "checkpoints" / "step-00000003")
    assert len(found.optimizer) == 8
    assert set(found.optimizer["0.weight"]) == keys
    return found


def saved_again(
    folder: Path, known: Snapshot, size: int, gather: str, cap_mb: float, **chosen: Any
) -> Snapshot:
    """``known``, loaded by ``size`` ranks and saved by them."""
    folder.mkdir()

    def work(world: World) -> None:
        job = make_job(world, known, max_steps=3, gather=gather, bucket_cap_mb=cap_mb, **chosen)
        saver = Saver(job.state(), folder, saved=lambda _: None)
        job.state().synchronize()
        saver.start(3)
        saver.finish()
        saver.close()
        job.optimizer.close()

    run_ranks(size, work)
    return checkpoint.load(folder / "checkpoints" / "step-00000003")


def test_every_rank_writes_its_own_share(tmp_path: Path) -> None:
    def work(world: World) -> None:
        Trainer(make_job(world, max_steps=2), tmp_path, listener=Notes()).run()

    run_ranks(3, work)
    folder = tmp_path / "checkpoints" / "step-00000002"
    names = [f"part-{rank:05d}.safetensors" for rank in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *names]
    counts = []
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            counts.append(sum(file.get_tensor(key).numel() for key in file.keys()))  # noqa: SIM118
    assert max(counts) < 1.3 * min(counts)


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing of step 4 ends only once all ranks have taken step 6."""
    write, far_enough = write_part, threading.Semaphore(0)

    def slow(path: Path, part: CheckpointPart) -> FileRecord:
        if "step-00000004" in str(path):
            assert far_enough.acquire(timeout=TIMEOUT_S)
        return write(path, part)

    class Release(Notes):
        def stepped(self, step: int) -> None:
            super().stepped(step)
            if step == 6:
                far_enough.release()

    monkeypatch.setattr(store, "write_part", slow)

    def work(world: World) -> list[str]:
        notes = Release()
        job = make_job(world, max_steps=7, checkpoint_interval=4)
        Trainer(job, tmp_path, listener=notes).run()
        return notes.events

    first, second = run_ranks(2, work)
    assert first.index("step-00000004") > first.index("step 6")
    assert first[-1] == "step-00000007" and second[-1] == "saved"
    assert checkpoint.load(tmp_path / "checkpoints" / "step-00000004").step == 4


def test_a_copy_is_saved_whatever_the_next_steps_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, changed = write_part, threading.Event()

    def late(path: Path, part: CheckpointPart) -> FileRecord:
        assert changed.wait(TIMEOUT_S)
        return write(path, part)

    monkeypatch.setattr(store, "write_part", late)

    def work(world: World) -> None:
        job = make_job(world)
        saver = Saver(job.state(), tmp_path, saved=lambda _: None)
        saver.start(1)
        expected = {name: t.clone() for name, t in job.task.model.state_dict().items()}
        with torch.no_grad():
            for parameter in job.task.model.parameters():
                parameter.fill_(7.0)
        world.barrier()
        changed.set()
        saver.finish()
        saver.close()
        assert same(checkpoint.load(tmp_path / "checkpoints" / "step-00000001").model, expected)
        job.optimizer.close()

    run_ranks(2, work)


def test_a_failure_of_one_rank_ends_all_soon_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_part

    def fill_up(path: Path, part: CheckpointPart) -> FileRecord:
        if path.parent.name.endswith("step-00000004") and path.name == "part-00001.safetensors":
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, part)

    monkeypatch.setattr(store, "write_part", fill_up)

    def work(world: World) -> list[str]:
        notes = Notes()
        job = make_job(world, max_steps=100_000, checkpoint_interval=2)
        with raises(AgreedError, "disk-full", 1, "disk is") as caught:
            Trainer(job, tmp_path, listener=notes).run()
        assert caught.value.exit_code == 6
        return notes.events

    first, second = run_ranks(2, work)
    assert "step-00000002" in first and "saved" in second
    assert [e for e in first if e.startswith("step ")] == [e for e in second if "step " in e]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


def test_a_failure_to_commit_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(draft: checkpoint.PendingCheckpoint, *_: object) -> Path:
        draft.discard()
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(checkpoint.PendingCheckpoint, "commit", fail)

    def work(world: World) -> None:
        job = make_job(world, max_steps=100_000, checkpoint_interval=2)
        with raises(AgreedError, "unforeseen-failure", "disk is"):
            Trainer(job, tmp_path, listener=Notes()).run()

    run_ranks(2, work)
    assert checkpoint.find_latest(tmp_path) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_not_finite_is_saved(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    others = [torch.empty(0), torch.arange(3), torch.tensor([True])]
    pieces = {
        f"model/{i}": TensorPiece.of(t, start=0, like=t) for i, t in enumerate([*others, values])
    }
    check_finite(CheckpointPart(pieces, {}), 7, "0123")
    values[41] = bad
    check_finite(CheckpointPart(pieces, {}), 7, "012")  # it is a buffer, such as a mask
    with raises(NonFiniteLossError, "not-finite", "3 is", 7):
        check_finite(CheckpointPart(pieces, {}), 7, "0123")


def test_one_copy_serves_for_all_checkpoints() -> None:
    buffer = CopyBuffer()
    values = torch.arange(10.0)
    part = CheckpointPart({"a": TensorPiece.of(values, start=0, like=values)}, {})
    first = buffer.copy(part)
    values.add_(1.0)
    second = buffer.copy(part)
    assert first.data.data_ptr() == second.data.data_ptr()
    assert torch.equal(second.pieces["a"].values, torch.arange(10.0) + 1.0)


def test_a_run_is_private_where_the_umask_asks_for_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = RunFolder.create(tmp_path, "a")
        folder.write_config("lr: 1\n")
        run_ranks(
            2, lambda w: Trainer(make_job(w, max_steps=1), folder.path, listener=Notes()).run()
        )
    finally:
        os.umask(before)
    written = [folder.path, *folder.path.rglob("*")]
    assert len(written) > 6
    assert [path for path in written if path.stat().st_mode & 0o077] == []
