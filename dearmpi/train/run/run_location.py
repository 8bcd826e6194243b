"""Run location: the folder of a run, and the checkpoint that it resumes from."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dearmpi.comm.world import World
from dearmpi.config import nearest
from dearmpi.errors import CheckpointError, ConfigError, TaskError
from dearmpi.train.checkpoint.survey import Survey, belongs_to_run, resolve, survey
from dearmpi.train.disk import FolderLock, is_folder, is_there, lock_folder, unwritable
from dearmpi.train.ranks.agreement import together
from dearmpi.train.run.run_folder import RunFolder, free_name


@dataclass(frozen=True, slots=True)
class RunLocation:
    """The same on all ranks.

    root, name: the run's folder is ``root/name``.
    checkpoint: what to go on from; None at a run's beginning.
    continued: whether the folder may hold the earlier part of this run.
    goes_on: from the newest checkpoint that there is in it, if there is one.
    begun_from: the checkpoint of another run that this one begins from, if so.
    notes: what people should know about the choice.
    found_in: the working folder, from which a relative ``root`` counts.
    """

    root: Path
    name: str
    checkpoint: Path | None = None
    continued: bool = False
    notes: tuple[str, ...] = ()
    begun_from: Path | None = None
    goes_on: bool = False
    found_in: Path = field(default_factory=Path.cwd)


def agree_on_location(world: World, chosen: Mapping[str, Any], *, default_root: str) -> RunLocation:
    """Rank 0 finds the location and sends it to the others (collective).

    chosen: the settings given by the user; only ``resume``, ``name`` and ``run_folder`` count.
    """
    text = ""
    with together(world, root_only=True):
        if world.is_root:
            location = find_location(chosen, default_root=default_root)
            text = json.dumps(asdict(location), default=str)
    sent = json.loads(world.broadcast_text(text))
    paths = ("root", "checkpoint", "begun_from")
    sent |= {name: None if sent[name] is None else Path(sent[name]) for name in paths}
    location = RunLocation(**sent | {"notes": tuple(sent["notes"]), "found_in": Path.cwd()})
    found = location.checkpoint
    with together(world):
        if found is not None and not is_folder(found, CheckpointError):
            raise CheckpointError(
                f"{found.absolute()} is no folder here, but rank 0 on {world.hosts[0]} found a "
                "checkpoint there; give a --run-folder that all hosts share",
                code="run-folder-not-shared",
            )
    return location


def check_shared(world: World, folder: Path) -> None:
    """Raise AgreedError on all ranks unless every one sees the same run folder (collective).

    Rank 0 writes a file with a new name, since network file systems cache for a while that a name
    does not exist.
    """
    mark = folder / f".seen-{world.broadcast_text(uuid.uuid4().hex)}"
    with together(world, root_only=True):
        if world.is_root:
            _make(mark)
    try:
        with together(world):
            if not is_there(mark, ConfigError):
                raise ConfigError(
                    f"{folder.absolute()} is not the folder that rank 0 on {world.hosts[0]} "
                    "made; give a --run-folder that all hosts share",
                    code="run-folder-not-shared",
                )
    finally:
        if world.is_root:
            mark.unlink(missing_ok=True)


def _make(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as error:
        raise unwritable(mark, error) from error


@contextmanager
def hold_folder(
    world: World, root: Path, name: str, *, resume: bool, prepare: Callable[[RunFolder], None]
) -> Iterator[RunFolder]:
    """Make the run folder ``root/name`` (collective); inside, no other job has it.

    resume: it may hold the earlier part of the run. prepare: fills it, on rank 0, once it is held.
    Raises AgreedError on all ranks where it cannot be made, is not free, or not every rank sees it.
    """
    lock: FolderLock | None = None
    with ExitStack() as held:
        with together(world, root_only=True):
            if world.is_root:
                folder = RunFolder.create(root, name, resume=resume)
                lock = held.enter_context(lock_folder(folder.lock_file))
                prepare(folder)
        check_shared(world, root / name)
        yield replace(RunFolder.open(root / name), lock=lock)


def find_location(chosen: Mapping[str, Any], *, default_root: str) -> RunLocation:
    """Find the location of a run. Raises ConfigError where the choice is not clear, CheckpointError
    where there is no checkpoint to go on from.
    """
    root = Path(chosen.get("run_folder", default_root))
    resume, name = chosen.get("resume"), chosen.get("name")
    if resume is None:
        if name is None:
            name = free_name(root, datetime.datetime.now())
        return _new(RunLocation(root, name))
    if resume == "auto":
        return _find_latest(root, name)
    if not is_there(Path(resume), CheckpointError) and (near := nearest(resume, ["auto"])):
        raise CheckpointError(
            f"--resume is {resume!r}, and there is no such folder; {near}give that with --name, or "
            "the path of a checkpoint or a run folder",
            code="no-checkpoint",
        )
    if name is not None and (begun := _find_begun(root, name, Path(resume))) is not None:
        return begun
    checkpoint = resolve(Path(resume))
    # Nothing is passed over where a checkpoint is named: itself, or by the file `best`.
    is_named = checkpoint == Path(resume) or not is_folder(Path(resume), CheckpointError)
    notes = () if is_named else _passed_over(survey(Path(resume)))
    if name is not None:
        return _new(
            RunLocation(root, name, checkpoint, notes=notes, begun_from=checkpoint.absolute())
        )
    return _continue(chosen, root, checkpoint, notes)


def _continue(
    chosen: Mapping[str, Any], root: Path, checkpoint: Path, notes: tuple[str, ...]
) -> RunLocation:
    """The run that wrote ``checkpoint``. Raises ConfigError where it is in no run of ``root``."""
    # Only a link to a checkpoint is followed: what else is one may be there on rank 0's host alone.
    own = checkpoint.resolve() if checkpoint.is_symlink() else checkpoint.absolute()
    if not belongs_to_run(own):
        raise ConfigError(
            f"{checkpoint} is not in the checkpoints/ folder of a run, so no run can be "
            "continued; start a new one from it with --name NAME",
            code="resume-unclear",
        )
    folder = own.parent.parent
    if "run_folder" in chosen and folder.parent.resolve() != root.resolve():
        raise ConfigError(
            f"the checkpoint {checkpoint} belongs to the run in {folder}, but run_folder is "
            f"{root}; leave out run_folder (--run-folder, environment or file) to continue "
            "there, or start another run with --name",
            code="resume-unclear",
        )
    return RunLocation(folder.parent, folder.name, own, continued=True, notes=notes)


def _new(location: RunLocation) -> RunLocation:
    """A location for a new run. Raises ConfigError now, instead of after set-up, if it is taken."""
    RunFolder(location.root / location.name).check_free(resume=False)
    return location


def _find_begun(root: Path, name: str, resume: Path) -> RunLocation | None:
    """The run ``name`` if it was begun from ``resume``: the very command that began it, which a
    scheduler gives again and again, goes on with it.
    """
    begun_from = RunFolder(root / name).read_begun_from()
    if begun_from is None or resume.absolute() not in (begun_from, begun_from.parent.parent):
        return None
    return _go_on(root, name, begun_from)


def _find_latest(root: Path, name: str | None) -> RunLocation:
    if name is None:
        raise ConfigError(
            "--resume auto needs --name NAME; it continues the run of that name, or starts it",
            code="resume-unclear",
        )
    return _go_on(root, name, RunFolder(root / name).read_begun_from())


def _go_on(root: Path, name: str, begun_from: Path | None) -> RunLocation:
    """The run ``name`` from its newest checkpoint; before its first from ``begun_from``, if any."""
    found = survey(root / name)
    _check_usable(found, root / name)
    if not found.latest and begun_from and not is_folder(begun_from, CheckpointError):
        raise CheckpointError(
            f"the run in {root / name} started from {begun_from}, which is gone, and has no "
            "checkpoint of its own; start another run with another --name",
            code="no-checkpoint",
        )
    notes = () if found.latest is None else _passed_over(found)
    checkpoint = found.latest or begun_from
    return RunLocation(
        root, name, checkpoint, continued=True, notes=notes, begun_from=begun_from, goes_on=True
    )


def _check_usable(found: Survey, run: Path) -> None:
    """A run that has been trained must not begin anew, and replace what may yet be mended."""
    if found.latest is None and found.passed_over:
        raise CheckpointError(
            f"no checkpoint of the run in {run} can be resumed from: "
            f"{'; '.join(found.passed_over)}; restore one, or start another run with another "
            "--name",
            code="no-checkpoint",
        )


def check_reachable(location: RunLocation) -> None:
    """Raise TaskError if ``root`` has another meaning than when the run was looked for there."""
    working = Path.cwd()
    if working != location.found_in and not location.root.is_absolute():
        raise TaskError(
            f"the task changed the working folder from {location.found_in} to {working}, which "
            f"moves the relative run folder {location.root}; keep the working folder, or give an "
            "absolute --run-folder",
            code="working-folder-changed",
        )


def check_unchanged(location: RunLocation) -> None:
    """Raise ConfigError if a job that had the folder until now has gone on meanwhile."""
    latest = survey(location.root / location.name).latest
    if location.goes_on and latest not in (None, location.checkpoint):
        raise ConfigError(
            f"the run in {location.root / location.name} went on to {latest.name} while this job "
            "was starting; start this job again",
            code="run-folder-in-use",
        )


def _passed_over(found: Survey) -> tuple[str, ...]:
    """A note on each; there is a checkpoint to go on from."""
    assert found.latest is not None
    instead = f"resuming from {found.latest.name}"
    return tuple(f"passed over: {reason}; {instead}" for reason in found.passed_over)
