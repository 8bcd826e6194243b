"""Checkpoint: a snapshot on disk that is complete or not there.

A run folder holds ``checkpoints/step-00001000/`` with a part per rank and ``manifest.json``, and a
file ``latest`` that names the folder to resume from. docs/reference/checkpoints.md states the
format and what is guaranteed. A ``PendingCheckpoint`` is not complete yet: one rank begins
it, all ranks write their parts, and the one rank commits it.
"""

from __future__ import annotations

import datetime
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dearmpi.errors import CheckpointError
from dearmpi.train import disk
from dearmpi.train.checkpoint import manifest
from dearmpi.train.checkpoint.manifest import FileRecord, Manifest, part_name
from dearmpi.train.checkpoint.part import (
    CheckpointPart,
    CopyBuffer,
    Head,
    make_head,
    make_part,
    model_key,
    read_parts,
    write_part,
)
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import (
    REPLACED,
    WRITING,
    advise,
    left_over,
    name_latest,
    next_serial,
    remove,
    remove_leftovers,
)
from dearmpi.version import __version__


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """The checkpoint of ``step`` in the run folder at ``run_folder``, until it is committed.

    Every method raises CheckpointError when it cannot do its work; earlier checkpoints and
    ``latest`` are then as they were.
    """

    run_folder: Path
    step: int

    @property
    def target(self) -> Path:
        """Where it will be."""
        return self.run_folder / "checkpoints" / f"step-{self.step:08d}"

    @property
    def folder(self) -> Path:
        """Where it is until then."""
        return self.target.with_name(WRITING + self.target.name)

    def begin(self) -> None:
        """Make its folder, and remove what a killed writer left behind. The run folder must exist:
        one that was removed while its run trains is not made again.
        """
        with self._explaining():
            self.target.parent.mkdir(exist_ok=True)
            remove_leftovers(self.target.parent)
            if self.folder.exists():  # of the same step, and not removed: it says why
                shutil.rmtree(self.folder)
            self.folder.mkdir()

    def write(self, part: CheckpointPart, *, rank: int) -> FileRecord:
        """Write the part of ``rank``, a copy, onto the disk."""
        with self._explaining(part.num_bytes):
            return write_part(self.folder / part_name(rank), part)

    def commit(self, head: Head, files: Sequence[FileRecord]) -> Path:
        """Make it a checkpoint, once every rank's part is written, and point ``latest`` at it.

        files: by rank. Returns its folder.
        """
        with self._explaining():
            record = Manifest(
                step=self.step,
                serial=next_serial(self.target.parent),
                written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                dearmpi=__version__,
                files={part_name(rank): file for rank, file in enumerate(files)},
                model=list(head.model),
                aliases=dict(head.aliases),
                groups=list(head.groups),
                meta=dict(head.meta),
            )
            disk.write_text(self.folder / manifest.FILE_NAME, manifest.to_text(record))
            _put_in_place(self.folder, self.target)
            name_latest(self.run_folder, self.target)
        _remove_replaced(self.target)
        return self.target

    def discard(self) -> None:
        """Remove the files written so far; errors are ignored."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _explaining(self, num_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _save_error(error, self.target, num_bytes) from error


def save(run_folder: Path, snapshot: Snapshot) -> Path:
    """Write ``snapshot``, all of it from this process, to ``run_folder``, which is made where it is
    missing; returns the checkpoint's folder.

    Raises CheckpointError when it cannot be written: what was written of it is removed, and
    earlier checkpoints and ``latest`` are as they were.
    """
    draft = PendingCheckpoint(run_folder, snapshot.step)
    try:
        with draft._explaining():
            run_folder.mkdir(parents=True, exist_ok=True)
        draft.begin()
        part, head = make_part(snapshot), make_head(snapshot)
        return draft.commit(head, [draft.write(CopyBuffer().copy(part), rank=0)])
    except BaseException:
        draft.discard()
        raise


def load(path: Path) -> Snapshot:
    """Read the checkpoint at ``path`` after verifying every file; changes nothing there.

    Tensors are on the CPU. Raises CheckpointError when it is missing, damaged, or of another
    format version.
    """
    return read(path, verify(path))


def read(path: Path, record: Manifest) -> Snapshot:
    """Read the checkpoint at ``path``, whose manifest is ``record`` and which is verified."""
    try:
        tensors, abouts = read_parts([path / name for name in sorted(record.files)])
        model = {name: tensors[model_key(record.aliases.get(name, name))] for name in record.model}
        return Snapshot(
            step=record.step,
            model=model,
            optimizer=_join_states([about["optimizer"] for about in abouts], tensors),
            groups=manifest.decode(record.groups, tensors=tensors),
            meta=manifest.decode(record.meta, tensors={}),
            random=[about["random"] for about in abouts if about["random"]],
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advise(path)}", code=error.code) from error
    except (
        *(OSError, SafetensorError, KeyError, TypeError),
        *(ValueError, RuntimeError, AttributeError, IndexError),
    ) as error:
        raise CheckpointError(
            f"cannot read {path}: {error!r}; {advise(path)}", code="checkpoint-damaged"
        ) from error


def verify(path: Path, *, rank: int = 0, size: int = 1) -> Manifest:
    """Return the manifest of the checkpoint at ``path`` after comparing every file's checksum.

    Where ``size`` ranks verify it together, each checks the files whose number modulo ``size`` is
    its rank. Raises CheckpointError with the file, both checksums, and what to do.
    """
    try:
        record = manifest.read_manifest(path)
        names = sorted(record.files)[rank::size]
        manifest.check_contents(path, {name: record.files[name] for name in names})
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advise(path)}", code=error.code) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; {advise(path)}", code="unreadable-file"
        ) from error
    return record


def _join_states(
    described: Sequence[dict[str, Any]], tensors: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter; several ranks may have entries of one parameter."""
    whole: dict[str, dict[str, Any]] = {}
    for states in described:
        for name, entries in states.items():
            whole.setdefault(name, {}).update(manifest.decode(entries, tensors=tensors))
    return whole


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; there is a complete checkpoint at every moment."""
    if target.exists():
        _remove_replaced(target)
        target.rename(target.with_name(target.name + REPLACED))
    temporary.rename(target)
    disk.sync_folder(target.parent)


def _remove_replaced(target: Path) -> None:
    """Remove the checkpoint that ``target`` has replaced; a failure is only a warning."""
    replaced = target.with_name(target.name + REPLACED)
    try:
        if replaced.exists():
            remove(replaced)
    except OSError as error:  # such as a file that somebody reads over NFS
        warnings.warn(left_over(error), stacklevel=1)


def _save_error(error: OSError, target: Path, num_bytes: int) -> CheckpointError:
    if error.errno not in disk.DISK_FULL:
        return CheckpointError(
            f"cannot save {target}: {error}; earlier checkpoints are untouched", code="cannot-write"
        )
    folder = next(parent for parent in target.parents if parent.exists())
    needed = f"{num_bytes} bytes are needed, " if num_bytes else ""
    return CheckpointError(
        f"cannot save {target}: the disk is full or over quota; {needed}"
        f"{shutil.disk_usage(folder).free} are free; earlier checkpoints are untouched: free "
        "space, or keep fewer of them, and resume",
        code="disk-full",
    )
