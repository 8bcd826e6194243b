"""Saving: the state of training as a checkpoint, while it goes on.

A checkpoint has two stages: every rank writes its part; then rank 0 commits. Each runs on a thread
beside training, which talks to no other rank: the ranks learn from the totals of a step how far all
of them are, and go on to the next stage between steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.readings import Readings
from dearmpi.engine.state.sharded_state import StatePiece
from dearmpi.engine.sync.model_tensors import broadcast_buffers
from dearmpi.errors import CheckpointError, NonFiniteLossError, UsageError
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.span import Track
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import CheckpointPart, CopyBuffer, Head, make_head, make_part
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import left_over
from dearmpi.train.ranks.agreement import share_failure, together
from dearmpi.train.ranks.random_state import capture_random_state

_NICENESS = 10  # of the writing thread, so that training has the cores first


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What checkpoints are made of.

    meta: plain data of the state after so many steps, the same on all ranks.
    start_step: optimizer steps taken before. keep: checkpoints that stay.
    others: further optimizers, of other parameters of ``model``; steps are counted of all together.
    extra: tensors to save besides, the same on all ranks, by names that the model does not have.
    refresh: called once parameters and buffers are current, before anything reads them.
    """

    model: nn.Module
    optimizer: DistributedOptimizer | LocalOptimizer
    meta: Callable[[int], dict[str, Any]]
    start_step: int = 0
    keep: int = 3
    others: tuple[DistributedOptimizer, ...] = ()
    extra: Callable[[], dict[str, Tensor]] = dict
    refresh: Callable[[], None] = lambda: None

    @property
    def optimizers(self) -> tuple[DistributedOptimizer | LocalOptimizer, ...]:
        """All of them, in order."""
        return (self.optimizer, *self.others)

    def traffic(self) -> tuple[float | None, float | None, int | None]:
        """MB that this rank sends in a step, the largest ``owed_share`` and all ``fallbacks``; None
        if not known, or nothing is compressed.
        """
        found = [one for one in self.optimizers if isinstance(one, Readings)]
        traffic = [one.traffic for one in found]
        owed = [one.owed_share for one in traffic if one.owed_share is not None]
        sent = sum(one.reduced + one.gathered for one in traffic)
        fallbacks = None
        if any(one.config.compress != "none" for one in found):
            fallbacks = sum(one.fallbacks for one in traffic)
        return sent / 1e6 if sent else None, max(owed, default=None), fallbacks

    @property
    def world(self) -> World:
        """The ranks that train."""
        return self.optimizer.world

    def synchronize(self) -> None:
        """Make parameters and buffers current and the same on all ranks (collective).

        Buffers are rank 0's: each rank's own statistics, as of BatchNorm, have seen only its
        samples.
        """
        for optimizer in self.optimizers:
            optimizer.synchronize()
        broadcast_buffers(self.model, self.world)
        self.refresh()

    def _shared_model(self) -> dict[str, Tensor]:
        """The model's tensors, with what ranks share in the place of each rank's own parameters."""
        if not isinstance(self.optimizer, LocalOptimizer):
            return dict(self.model.state_dict())
        shared = self.optimizer.shared_values()
        named = self.model.state_dict(keep_vars=True)
        return {name: shared.get(id(own), own.detach()) for name, own in named.items()}

    def part(self, step: int) -> tuple[Snapshot, CheckpointPart]:
        """The state after ``step`` steps that is the same on all ranks, and this rank's part of
        the checkpoint. Nothing is copied; parameters must be current.
        """
        whole: dict[str, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        pieces: list[StatePiece] = []
        owned: dict[str, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            local = optimizer.local_state()
            names = checkpoint.parameter_names(self.model, optimizer.param_groups)
            plain = {"state": {}, "param_groups": local.groups}
            groups += checkpoint.optimizer_by_name(plain, names)[1]
            prefix = find_prefix(optimizer, self.model, names)
            whole |= {prefix + name: state for name, state in local.whole.items()}
            owned |= {prefix + name: state for name, state in local.owned.items()}
            pieces += [replace(piece, name=prefix + piece.name) for piece in local.pieces]
        random = [capture_random_state()]
        model = self._shared_model() | self.extra()
        snapshot = Snapshot(step, model, whole, groups, self.meta(step), random)
        rank, size = self.world.rank, self.world.size
        return snapshot, make_part(snapshot, shards=pieces, owned=owned, rank=rank, size=size)


def find_prefix(optimizer: Readings, model: nn.Module, names: Sequence[str]) -> str:
    """What stands in ``model`` before the names of parameters in the module that ``optimizer`` was
    made with: empty if it is ``model`` itself. names: of its parameters in ``model``.
    """
    own = {name for bucket in optimizer.layout for name in bucket.names}
    known = set(names)
    for path, _ in model.named_modules():
        prefix = f"{path}." if path else ""
        if all(prefix + name in known for name in own):
            return prefix
    raise UsageError(
        "an optimizer was made with a module that is not in the run's model; give Run the module "
        "that holds all of them, such as nn.ModuleDict",
        code="parameters-not-in-model",
    )


class SaveStage(Enum):
    """What becomes of a checkpoint in the background."""

    IDLE = auto()
    WRITING = auto()
    COMMITTING = auto()


class Saver:
    """Saves ``state`` to the run folder at ``folder``; its methods are collective.

    saved: called on every rank with the folder of a checkpoint, on rank 0, once it is complete.
    check_own: called on rank 0 before anything in the folder is changed; raises where the folder is
        another job's by now.
    A failure is raised on every rank alike, as AgreedError, by the first call that learns of it;
    earlier checkpoints are untouched.
    """

    def __init__(
        self,
        state: TrainingState,
        folder: Path,
        *,
        saved: Callable[[Path | None], None],
        check_own: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._folder, self._saved, self._check_own = state, folder, saved, check_own
        self.started_step = self.saved_step = state.start_step
        self._stage = SaveStage.IDLE
        self._copy = CopyBuffer()
        self._thread = ThreadPoolExecutor(1, "dearmpi-saving", _be_nice)
        self._work: Future[Any] | None = None
        self._num_begun, self._is_best = 0, False
        self._head: Head | None = None
        named = state.model.named_parameters(remove_duplicate=False)
        self._trained = frozenset(name for name, _ in named)

    @property
    def num_done(self) -> int:
        """Stages that this rank has finished since the start; for the totals of a step."""
        under_way = self._work is not None and not self._work.done()
        return self._num_begun - under_way

    def start(self, step: int, *, is_best: bool = False) -> None:
        """Begin to save the state after ``step`` steps, once a checkpoint under way is written.
        Parameters and buffers must be current (``TrainingState.synchronize``).

        is_best: the run folder's file ``best`` names it, once it is complete.
        """
        self._end_stages()
        draft = self._draft(step)
        with together(self._state.world):  # once, since each time waits for the slowest rank
            snapshot, part = self._state.part(step)
            self._head = make_head(snapshot) if self._state.world.is_root else None
            copied = self._copy.copy(part)
            if self._state.world.is_root:
                self._check_own()
                self._prune()  # a resumed run may keep fewer than its earlier part did
                draft.begin()
        self.started_step, self._is_best = step, is_best
        self._begin(SaveStage.WRITING, lambda: self._write(draft, copied))

    def advance(self, num_done: int) -> None:
        """Go on to the next stage if all ranks have finished this one.

        num_done: the sum of the ranks' ``num_done`` in the totals of a step.
        """
        is_over = num_done == self._state.world.size * self._num_begun
        if is_over and not self._is_idle:
            self._end_stage()

    def finish(self) -> None:
        """Wait until nothing is being written any more."""
        if not self._is_idle:
            with self._state.optimizer.spans.span(Track.CHECKPOINT, "checkpoint"):
                self._end_stages()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    @property
    def _is_idle(self) -> bool:
        return self._stage is SaveStage.IDLE

    def _draft(self, step: int) -> checkpoint.PendingCheckpoint:
        return checkpoint.PendingCheckpoint(self._folder, step)

    def _begin(self, stage: SaveStage, work: Callable[[], Any]) -> None:
        self._stage = stage
        self._num_begun += 1
        self._work = self._thread.submit(work)

    def _end_stages(self) -> None:
        while not self._is_idle:
            self._end_stage()

    def _end_stage(self) -> None:
        assert self._work is not None
        stage, self._stage = self._stage, SaveStage.IDLE
        failure = self._work.exception()
        draft, world = self._draft(self.started_step), self._state.world
        try:
            share_failure(
                world,
                failure if isinstance(failure, Exception) else None,
                root_only=stage is SaveStage.COMMITTING,
            )
        except Exception:
            if world.is_root:
                self._discard(draft)
            raise
        result, self._work = self._work.result(), None
        if stage is SaveStage.WRITING:
            texts = world.all_gather_text(json.dumps(asdict(result)))
            files = [FileRecord(**json.loads(text)) for text in texts]
            self._begin(SaveStage.COMMITTING, lambda: self._commit(draft, files))
        else:
            self.saved_step = self.started_step
            self._saved(result)

    def _write(self, draft: checkpoint.PendingCheckpoint, part: CheckpointPart) -> FileRecord:
        check_finite(part, draft.step, self._trained)
        return draft.write(part, rank=self._state.world.rank)

    def _commit(self, draft: checkpoint.PendingCheckpoint, files: list[FileRecord]) -> Path | None:
        if self._head is None:
            return None  # rank 0's work
        self._check_own()
        path = draft.commit(self._head, files)
        if self._is_best:
            checkpoint.name_best(self._folder, path)
        self._prune()
        return path

    def _discard(self, draft: checkpoint.PendingCheckpoint) -> None:
        with contextlib.suppress(CheckpointError):  # another job may have a draft of that name
            self._check_own()
            draft.discard()

    def _prune(self) -> None:
        try:
            checkpoint.prune(self._folder, self._state.keep)
        except OSError as error:  # such as a file that somebody reads over NFS
            warnings.warn(left_over(error), stacklevel=1)
        except CheckpointError as error:
            warnings.warn(
                f"old checkpoints are kept for now: {error}; the next save looks for them again",
                stacklevel=1,
            )


def check_finite(part: CheckpointPart, step: int, names: Container[str]) -> None:
    """Raise NonFiniteLossError unless all numbers in ``part`` of the parameters ``names`` are
    finite. Those of buffers need not be: a mask holds infinities for good.
    """
    for key, piece in part.pieces.items():
        kind, _, name = key.partition("/")
        if kind == "model" and name in names and not _is_finite(piece.values):
            raise NonFiniteLossError(
                f"{name} is not finite after step {step}, so its checkpoint was not written; "
                "resume from an earlier one with a lower --lr or with --max-grad-norm",
                code="not-finite",
            )


def _is_finite(values: Tensor) -> bool:
    """As ``values.isfinite().all()``, without memory for as many answers."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or not values.numel():
        return True
    return all(bool(extreme.isfinite()) for extreme in values.aminmax())


def _be_nice() -> None:
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a system that forbids it
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
