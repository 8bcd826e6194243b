"""What a run begins with is what was asked for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.train.checkpoint import manifest
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.data.data import Batches, MicroBatch
from dearmpi.train.loop import session
from dearmpi.train.loop.session import open_session
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.settings.sources import make_source
from tests.fakes.ranks import run_ranks
from tests.unit.train.checkpoint.example_snapshot import flip_byte, make_snapshot, save_in_parts
from tests.unit.train.points import SGD, equal, make_task, parameters


@pytest.fixture(autouse=True)
def _points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task is that of a few points."""
    monkeypatch.setattr(session, "build_task", lambda spec, options: make_task())


def begin(world: World, **given: object) -> tuple[list[Tensor], tuple[MicroBatch, ...]]:
    """The model, and the samples of the first step."""
    source = make_source("flag", {"task": "points", "max_steps": 1, **SGD, **given})
    job = open_session(world, [source]).job
    job.optimizer.close()
    assert isinstance(job.batches, Batches)
    return parameters(job.task.model), job.batches.step(0, 0)


def test_the_seed_decides_on_the_model_and_on_the_order_of_the_samples(alone: World) -> None:
    model, samples = begin(alone, seed=5)
    same_model, same_samples = begin(alone, seed=5)
    other_model, other_samples = begin(alone, seed=6)
    assert equal(same_model, model) and same_samples == samples
    assert not equal(other_model, model) and other_samples != samples


def test_torch_is_told_whether_operators_must_repeat(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else it would be set for good
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    begin(alone, deterministic=True)
    begin(alone, deterministic=False)
    assert told == [True, False]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("number", range(5))
def test_ranks_share_the_verifying_of_a_checkpoint_and_all_refuse_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, damage: str
) -> None:
    checkpoint = save_in_parts(tmp_path / "a", make_snapshot(), 5)
    broken = checkpoint / f"part-{number:05d}.safetensors"
    if damage == "flipped":
        flip_byte(broken, broken.stat().st_size - 1)
    elif damage == "truncated":
        broken.write_bytes(broken.read_bytes()[:-1])
    else:
        broken.unlink()
    hashed: Counter[str] = Counter()
    record_file = manifest.record_file

    def note(path: Path) -> FileRecord:
        hashed[path.name] += 1
        return record_file(path)

    monkeypatch.setattr(manifest, "record_file", note)
    told = run_ranks(3, lambda world: refusal_of(world, checkpoint))
    assert len(set(told)) == 1, "all ranks are told the same"
    words = {
        "flipped": "is corrupted: SHA-256",
        "truncated": "is truncated",
        "missing": "is missing",
    }
    wrong = rf"{broken} {words[damage]}[^\n]*restore it from a copy[^\n]*"
    assert re.fullmatch(rf"rank {number % 3} on [^\n]*{wrong}", told[0])
    assert hashed and max(hashed.values()) == 1, "a file is hashed once, whatever the ranks"


def refusal_of(world: World, checkpoint: Path) -> str:
    with pytest.raises(AgreedError) as caught:
        begin(world, resume=str(checkpoint))
    assert caught.value.exit_code == 6
    return str(caught.value)
