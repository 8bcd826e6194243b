"""Saving: a job's state as a checkpoint, complete and free of NaN, or none at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dearmpi.engine.broadcast import broadcast_buffers
from dearmpi.errors import NonFiniteLossError
from dearmpi.train import checkpoint
from dearmpi.train.agreement import together
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.job import Job
from dearmpi.train.random_state import capture_random_state


def synchronize(job: Job) -> None:
    """Make parameters and buffers current and the same on all ranks (collective).

    Buffers are rank 0's: each rank's own statistics, as of BatchNorm, have seen only its samples.
    """
    job.optimizer.synchronize()
    broadcast_buffers(job.task.model, job.world)


def save(job: Job, folder: Path, step: int) -> Path | None:
    """Write the checkpoint after ``step`` steps to the run folder at ``folder`` (collective).

    Returns its folder on rank 0. Raises, on every rank alike, NonFiniteLossError where a parameter
    is not finite and AgreedError where the checkpoint cannot be written; earlier checkpoints are
    untouched.
    """
    synchronize(job)
    snapshot = take_snapshot(job, step)
    check_finite(snapshot.model, step)
    path: Path | None = None
    with together(job.world, root_only=True):
        if job.world.is_root:
            path = checkpoint.save(folder, snapshot)
            checkpoint.prune(folder, job.settings.keep)
    return path


def take_snapshot(job: Job, step: int) -> Snapshot:
    """The job's state after ``step`` steps (collective); parameters must be current."""
    names = checkpoint.parameter_names(job.task.model, job.optimizer.param_groups)
    optimizer, groups = checkpoint.optimizer_by_name(job.optimizer.state_dict(), names)
    states = job.world.all_gather_text(json.dumps(capture_random_state()))
    epoch, step_in_epoch = job.position(step)
    meta = {
        "task": job.task.name,
        "epoch": epoch,
        "step_in_epoch": step_in_epoch,
        "num_samples": job.plan.num_samples,
        "world_size": job.world.size,
        "lr_factor": job.curve.factor(step),
        "config": job.settings.as_plain(),
        "random": [json.loads(state) for state in states],
    }
    return Snapshot(step, dict(job.task.model.state_dict()), optimizer, groups, meta)


def check_finite(model: Mapping[str, Tensor], step: int) -> None:
    """Raise NonFiniteLossError unless all of the model's numbers are finite."""
    for name, tensor in model.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteLossError(
                f"{name} is not finite after step {step}, so no checkpoint was written of it; "
                "resume from an earlier one with a lower --lr or with --max-grad-norm"
            )
