"""Resuming: a checkpoint's state, found, read and put back by all ranks together.

A checkpoint keeps plain data in its manifest and tensors in its parts. A script may save more than
model and optimizer, such as a moving average. Its tensors are saved among the model's, under names
that no model has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.errors import CheckpointError
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import go_back, list_checkpoints
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.random_state import restore_random_state, seed_all

PREFIX = "@states/"
_TENSOR = "@tensor"


class Stateful(Protocol):
    """Something whose state is plain data and tensors, the same on all ranks, such as a scheduler
    or a moving average.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def find_newest(world: World, run_folder: Path, job: World | None = None) -> Path | None:
    """The checkpoint to resume from, as rank 0 finds it (collective).

    job: the ranks that take the same steps, if they are more than ``world``: it is the newest step
    that each of their run folders holds, and what came after is given up. Raises CheckpointError
    on all of them if there is none in some folders, or none of the same step.
    """
    job = world if job is None else job
    found: list[str] = []
    with together(job, root_only=job is world):
        if world.is_root and (newest := checkpoint.find_latest(run_folder)) is not None:
            found = [str(newest)]
            if job is not world:  # the newest last
                complete = list_checkpoints(run_folder / "checkpoints")[0]
                found = [str(path) for path in sorted(complete) if path.name <= newest.name]
    found = json.loads(world.broadcast_text(json.dumps(found)))
    if job is world:
        return Path(found[0]) if found else None
    path = _newest_of_all(job, run_folder, [Path(one) for one in found])
    with together(job):
        if world.is_root and path is not None:
            go_back(run_folder, path)
    return path


def _newest_of_all(job: World, run_folder: Path, found: Sequence[Path]) -> Path | None:
    """The newest of ``found``, in order, whose step every rank of ``job`` has (collective)."""
    report = json.dumps([str(run_folder), [path.name for path in found]])
    of_all = dict(json.loads(text) for text in job.all_gather_text(report))
    common = set.intersection(*(set(names) for names in of_all.values()))
    if not common and any(of_all.values()):
        steps = (f"{folder} has {', '.join(of) or 'none'}" for folder, of in of_all.items())
        raise CheckpointError(
            f"no checkpoint of the same step is in all run folders: {'; '.join(steps)}; copy what "
            "is missing there, or start a new run in other folders",
            code="no-checkpoint",
        )
    return next((path for path in reversed(found) if path.name in common), None)


def load_together(world: World, path: Path) -> Snapshot:
    """What all ranks go on from; each verifies a share of its files (collective).

    All files are verified before any is read, so that one rank reports a damaged file by its
    checksum.
    """
    with together(world):
        record = checkpoint.verify(path, rank=world.rank, size=world.size)
    with together(world):
        return checkpoint.read(path, record)


def restore(
    snapshot: Snapshot,
    model: nn.Module,
    optimizers: Sequence[DistributedOptimizer | LocalOptimizer],
    states: Mapping[str, Stateful],
) -> None:
    """Put ``snapshot`` into a model that is distributed, its optimizers and what was saved besides
    (collective).

    Raises AgreedError where the checkpoint is of another model or has other ``states``.
    """
    for optimizer in optimizers:
        optimizer.synchronize()
    own, tensors = split_tensors(snapshot.model)
    snapshot = replace(snapshot, model=own)
    with together(optimizers[0].world):
        _check_kind(snapshot, optimizers[0])
        checkpoint.check_model(snapshot, model.state_dict())
        stored = snapshot.meta.get("states", {})
        if stored.keys() != states.keys():
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} has states {sorted(stored)}, and the "
                f"script {sorted(states)}; give the same, or start a new run",
                code="checkpoint-of-other-model",
            )
        model.load_state_dict(snapshot.model)
        wholes = [_share_of(snapshot, model, one, len(optimizers)) for one in optimizers]
        for name, state in states.items():
            now = state.state_dict()
            # Schedulers with milestones keep a Counter, which is a mapping once it is stored.
            state.load_state_dict(
                {
                    key: Counter(value) if isinstance(now.get(key), Counter) else value
                    for key, value in unpack_state(stored[name], tensors).items()
                }
            )
    for optimizer, whole in zip(optimizers, wholes, strict=True):
        if isinstance(optimizer, LocalOptimizer):
            optimizer.load_local_state(whole, snapshot.meta["local"])
        else:
            optimizer.load_state_dict(whole)


def _check_kind(snapshot: Snapshot, optimizer: DistributedOptimizer | LocalOptimizer) -> None:
    """Raise CheckpointError where one of the two has local steps, and the other has none."""
    is_local = isinstance(optimizer, LocalOptimizer)
    if is_local == ("local" in snapshot.meta):
        return
    found, wanted = "averaged gradients", "local steps"
    if not is_local:
        found, wanted = wanted, found
    raise CheckpointError(
        f"the checkpoint of step {snapshot.step} is of {found}, and the optimizer a "
        f"{type(optimizer).__name__}, of {wanted}; give the optimizer of the run that wrote it, "
        "or start a new run from the model that dear-train export writes",
        code="checkpoint-of-other-model",
    )


def _share_of(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: DistributedOptimizer | LocalOptimizer,
    num_optimizers: int,
) -> dict[str, Any]:
    """The state of one of several optimizers; what no optimizer has is refused."""
    names = checkpoint.parameter_names(model, optimizer.param_groups)
    if num_optimizers > 1:
        known = set(names)
        groups = [group for group in snapshot.groups if known & set(group["params"])]
        state = {name: value for name, value in snapshot.optimizer.items() if name in known}
        snapshot = replace(snapshot, groups=groups, optimizer=state)
    return checkpoint.optimizer_state_dict(snapshot, names)


def continue_random_state(world: World, snapshot: Snapshot | None, *seed: int) -> None:
    """Continue this rank's random numbers where they stopped; where the number of ranks has
    changed, at the start, or for a device that was not used before, draw from ``seed`` and rank.
    """
    states = [] if snapshot is None else snapshot.random
    seed_all(*seed, world.rank)
    if len(states) == world.size:
        restore_random_state(states[world.rank])


def pack_state(name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state called ``name`` as plain data with a mark for each tensor, and the tensors."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            return {key: walk(part, f"{path}/{key}") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = (walk(part, f"{path}/{place}") for place, part in enumerate(value))
            return type(value)(parts) if type(value) in (list, tuple) else tuple(parts)
        return value

    return walk(state, f"{PREFIX}{name}"), tensors


def unpack_state(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that ``pack_state`` has taken apart."""

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == {_TENSOR}:
                return tensors[value[_TENSOR]]
            return {key: walk(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(part) for part in value)
        return value

    return {key: walk(part) for key, part in plain.items()}


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors of a checkpoint, and those of extra states."""
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    return model, {n: tensor for n, tensor in tensors.items() if n.startswith(PREFIX)}
