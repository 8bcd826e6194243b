"""Survey: which checkpoints a run folder holds, which of them to resume from, which to remove."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dearmpi.errors import CheckpointError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train import disk
from dearmpi.train.checkpoint import manifest
from dearmpi.train.checkpoint.manifest import Manifest
from dearmpi.train.disk import is_folder, is_there, mode_of

# A checkpoint that is being replaced by one of the same step is complete until that one is.
FOLDER_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_MOST_NAMES = 24  # in an error
BEST = "best"  # the file in a run folder
REPLACED = ".replaced"
WRITING = ".writing-"
REMOVING = ".removing-"


@dataclass(frozen=True, slots=True)
class Survey:
    """What a run folder holds.

    latest: the checkpoint to resume from, None where there is none.
    passed_over: what is wrong with ``latest``, or with the checkpoint that it names. Also what is
        wrong with each damaged checkpoint that is not older than the one to resume from.
    """

    latest: Path | None
    passed_over: tuple[str, ...]


def survey(run_folder: Path) -> Survey:
    """Find the checkpoint to resume from: the one that ``latest`` names if it is complete, else
    the complete one that was written last.

    Complete means that the manifest is whole and all files have their sizes; contents are verified
    when the checkpoint is loaded. Folders that a killed writer left behind are not considered.
    """
    complete, damaged = list_checkpoints(run_folder / "checkpoints")
    text = _read_latest(run_folder)
    named = _folder_named(run_folder, text)
    latest = _choose(complete, named)
    floor = -1 if latest is None else _step_of(latest)
    reasons = [damaged[p] for p in sorted(damaged) if _step_of(p) >= floor or p == named]
    pointer = run_folder / "latest"
    if text is None and len(complete) > 1:  # the first checkpoint may be there before it
        reasons.insert(0, f"there is no {pointer}, which would name one of {len(complete)}")
    elif text is not None and named is None:
        reasons.insert(0, f"{pointer} holds {_shortened(text)!r}, which names no checkpoint")
    elif named is not None and named not in complete and named not in damaged:
        reasons.insert(0, f"{pointer} names {named.name}, which does not exist")
    return Survey(latest=latest, passed_over=tuple(reasons))


def belongs_to_run(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` lies where a run has its own, under the name that it gave it."""
    named = FOLDER_NAME.fullmatch(checkpoint.name) is not None
    return named and checkpoint.parent.name == "checkpoints"


def go_back(run_folder: Path, checkpoint: Path) -> None:
    """Make ``latest`` name ``checkpoint`` if it is one of this run; later checkpoints are given up,
    the best one too. Raises CheckpointError where it cannot be written.
    """
    own = run_folder / "checkpoints" / checkpoint.name
    if not own.is_dir() or not own.samefile(checkpoint) or own == find_latest(run_folder):
        return
    try:
        best = find_best(run_folder)
        if best is not None and _step_of(best) > _step_of(own):
            (run_folder / BEST).unlink(missing_ok=True)
        name_latest(run_folder, own)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {run_folder / 'latest'}: {error.strerror}; free space or make the "
            "folder writable, to resume from an earlier checkpoint",
            code="cannot-write",
        ) from error


def name_latest(run_folder: Path, checkpoint: Path) -> None:
    """Make ``latest`` name ``checkpoint``. Raises OSError where it cannot be written."""
    disk.write_text(run_folder / "latest", f"checkpoints/{checkpoint.name}\n")


def name_best(run_folder: Path, checkpoint: Path) -> None:
    """Make the file ``best`` name ``checkpoint``. Raises CheckpointError where it cannot be
    written.
    """
    try:
        disk.write_text(run_folder / BEST, f"checkpoints/{checkpoint.name}\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write {run_folder / BEST}: {error.strerror}; the checkpoint itself is saved",
            code="cannot-write",
        ) from error


def find_best(run_folder: Path) -> Path | None:
    """The checkpoint that the file ``best`` names; None where there is none, or where somebody has
    a link or folder of that name.
    """
    if is_folder(run_folder / BEST, CheckpointError):
        return None
    named = _folder_named(run_folder, _read_pointer(run_folder / BEST))
    return named if named is not None and named.is_dir() else None


def find_latest(run_folder: Path) -> Path | None:
    """Return the checkpoint to resume from, or None; ``survey`` reports what was passed over."""
    return survey(run_folder).latest


def resolve(path: Path) -> Path:
    """Return the checkpoint that ``path`` means: itself, the latest of a run folder, or the one
    that its file ``best`` names.

    Raises CheckpointError when there is none, or it may not be looked at.
    """
    if path.name == BEST and (best := find_best(path.parent)) is not None:
        return best
    if not is_folder(path, CheckpointError):
        raise CheckpointError(
            f"{path} is no folder; give a checkpoint or a run folder", code="no-checkpoint"
        )
    if is_there(path / manifest.FILE_NAME, CheckpointError) or FOLDER_NAME.fullmatch(path.name):
        return path
    is_inside = path.name == "checkpoints" and not is_there(path / "checkpoints", CheckpointError)
    found = survey(path.parent if is_inside else path)
    if found.latest is None:
        reasons = "; ".join(found.passed_over) or "give a checkpoint or a run folder"
        runs = [run.name for run in list_runs(path)]
        if runs:
            more = ", ..." if len(runs) > _MOST_NAMES else ""
            reasons = f"it is a folder of runs; give one of {', '.join(runs[:_MOST_NAMES])}{more}"
        raise CheckpointError(
            f"{path} holds no complete checkpoint: {reasons}", code="no-checkpoint"
        )
    return found.latest


def list_runs(folder: Path) -> list[Path]:
    """The run folders in ``folder``, by name, and those that may not be looked at. Empty if
    ``folder`` is a run itself, or no folder. Raises CheckpointError for an unreadable folder.
    """
    if not is_folder(folder, CheckpointError) or is_there(folder / "checkpoints", CheckpointError):
        return []
    try:
        return sorted(path for path in folder.iterdir() if _may_be_run(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot list {folder}: {error.strerror}", code="unreadable-file"
        ) from error


def _may_be_run(path: Path) -> bool:
    try:
        return stat.S_ISDIR(mode_of(path / "checkpoints"))
    except OSError:
        return True


def prune(run_folder: Path, keep: int) -> tuple[Path, ...]:
    """Remove complete checkpoints except the ``keep`` written last, the one to resume from and the
    best one.

    Damaged checkpoints stay, for the user to judge. Returns the folders that were removed; raises
    OSError when one cannot be.
    """
    checkpoints = run_folder / "checkpoints"
    if len(_folders(checkpoints)) <= keep:  # as mostly before a save, for which all ranks wait
        return ()
    complete, _ = list_checkpoints(checkpoints)
    latest = _choose(complete, _folder_named(run_folder, _read_latest(run_folder)))
    by_age = sorted(complete, key=lambda path: _order(complete[path]))
    needed = (latest, find_best(run_folder))
    removed = tuple(path for path in by_age[: max(0, len(by_age) - keep)] if path not in needed)
    for path in removed:
        remove(path)
    return removed


def list_checkpoints(checkpoints: Path) -> tuple[dict[Path, Manifest], dict[Path, str]]:
    """Return (manifests of the complete checkpoints, what is wrong with the others)."""
    complete: dict[Path, Manifest] = {}
    damaged: dict[Path, str] = {}
    for folder in _folders(checkpoints):
        try:
            record = manifest.read_manifest(folder)
            manifest.check_sizes(folder, record.files)
        except CheckpointError as error:
            damaged[folder] = str(error)
        else:
            complete[folder] = record
    return complete, damaged


def _folders(checkpoints: Path) -> list[Path]:
    """The checkpoints by their names, whatever is in them."""
    try:
        return sorted(p for p in checkpoints.iterdir() if FOLDER_NAME.fullmatch(p.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list {checkpoints}: {error.strerror}", code="unreadable-file"
        ) from error


def _choose(complete: Mapping[Path, Manifest], named: Path | None) -> Path | None:
    """The one to resume from: what ``latest`` names, else what was written last."""
    if named in complete:
        return named
    return max(complete, key=lambda path: _order(complete[path]), default=None)


def next_serial(checkpoints: Path) -> int:
    """Return the serial number for a checkpoint that is about to be written."""
    complete, _ = list_checkpoints(checkpoints)
    return 1 + max((record.serial for record in complete.values()), default=0)


def advise(path: Path) -> str:
    """The cure for a checkpoint at ``path`` that cannot be loaded."""
    try:
        complete, _ = list_checkpoints(path.parent)
    except CheckpointError:
        complete = {}
    others = [other for other in complete if other != path]
    if not others:
        return "restore it from a copy, or start a new run"
    best = max(others, key=lambda other: _order(complete[other]))
    return f"restore it from a copy, or resume from {best}"


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what a killed writer left behind, and what has been replaced."""
    for folder in list(checkpoints.iterdir()):
        if folder.name.startswith((WRITING, REMOVING)):
            shutil.rmtree(folder, ignore_errors=True)  # where a file is in use, next time
        elif folder.name.endswith(REPLACED) and folder.with_suffix("").exists():
            with contextlib.suppress(OSError):
                remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it ceases to be one at once, however long the removal takes.

    Raises OSError where something of it, such as a file in use, is left over.
    """
    names = (folder.with_name(f"{REMOVING}{folder.name}.{number}") for number in itertools.count())
    hidden = next(path for path in names if not path.exists())
    folder.rename(hidden)
    shutil.rmtree(hidden)


def left_over(error: OSError) -> str:
    """The warning about a checkpoint that could not be removed."""
    return f"an old checkpoint is left over: {error}; remove it"


def _order(record: Manifest) -> tuple[int, int]:
    """Key that grows in the order of writing: a run resumed from an earlier step goes back."""
    return record.serial, record.step


def _step_of(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _read_latest(run_folder: Path) -> str | None:
    """The content of the file ``latest``, unchecked; None where there is none."""
    return _read_pointer(run_folder / "latest")


def _read_pointer(path: Path) -> str | None:
    try:
        return regular_file(path).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        purpose = "is the best" if path.name == BEST else "to resume from"
        raise CheckpointError(
            f"cannot read {path}, which names the checkpoint {purpose}: {error.strerror}; make it "
            "readable, or remove it to resume from the newest checkpoint",
            code="unreadable-file",
        ) from error


def _folder_named(run_folder: Path, text: str | None) -> Path | None:
    if text is None:
        return None
    folder = run_folder / "checkpoints" / text.removeprefix("checkpoints/")
    return folder if FOLDER_NAME.fullmatch(folder.name) else None


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
