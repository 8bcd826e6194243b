"""An example of a snapshot, and what is on disk once it is saved."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from dearmpi.train.checkpoint import PendingCheckpoint, Snapshot
from dearmpi.train.checkpoint.part import CopyBuffer, make_head, make_part


def make_snapshot(step: int = 10, *, fill: float = 0.5) -> Snapshot:
    weight = torch.full((4, 3), fill)
    return Snapshot(
        step=step,
        model={"weight": weight, "bias": torch.arange(3.0)},
        optimizer={"weight": {"step": torch.tensor(10.0), "exp_avg": weight * 0.1, "count": 3}},
        groups=[{"lr": 0.1, "betas": (0.9, 0.999), "params": ["weight", "bias"]}],
        meta={"epoch": 2, "world_size": 4},
    )


def save_in_parts(run_folder: Path, snapshot: Snapshot, size: int) -> Path:
    """The folder of a checkpoint that ``size`` ranks have written."""
    run_folder.mkdir(exist_ok=True)
    draft = PendingCheckpoint(run_folder, snapshot.step)
    draft.begin()
    parts = [make_part(snapshot, rank=rank, size=size) for rank in range(size)]
    files = [draft.write(CopyBuffer().copy(part), rank=rank) for rank, part in enumerate(parts)]
    return draft.commit(make_head(snapshot), files)


def content_of(folder: Path) -> dict[str, str]:
    """Every file under ``folder`` with its checksum."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))
