"""Checkpoint: a snapshot on disk that is complete or not there.

A run folder holds ``checkpoints/step-00001000/`` with ``model.safetensors``,
``optimizer.safetensors`` and ``manifest.json``, and a file ``latest`` that names the folder to
resume from. docs/checkpoints.md states the format and what is guaranteed.
"""

from __future__ import annotations

import datetime
import errno
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

import dearmpi
from dearmpi.errors import CheckpointError
from dearmpi.train import durable
from dearmpi.train.checkpoint import encoding, manifest, tensor_file
from dearmpi.train.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, Manifest
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import (
    REPLACED,
    WRITING,
    advise,
    next_serial,
    remove,
    remove_leftovers,
)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def save(run_folder: Path, snapshot: Snapshot) -> Path:
    """Write ``snapshot`` to ``run_folder``, point ``latest`` at it, and return its folder.

    Raises CheckpointError when it cannot be written: what was written of it is removed, and
    earlier checkpoints and ``latest`` are as they were.
    """
    checkpoints = run_folder / "checkpoints"
    target = checkpoints / f"step-{snapshot.step:08d}"
    temporary = checkpoints / f"{WRITING}{target.name}"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_leftovers(checkpoints)
        temporary.mkdir()
        _write_files(temporary, snapshot, serial=next_serial(checkpoints))
        _put_in_place(temporary, target)
        durable.write_text(run_folder / "latest", f"checkpoints/{target.name}\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _save_error(error, target, snapshot) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def load(path: Path) -> Snapshot:
    """Read the checkpoint at ``path`` after verifying every file; changes nothing there.

    Tensors are on the CPU. Raises CheckpointError when it is missing, damaged, or of another
    format version.
    """
    record = verify(path)
    try:
        model = tensor_file.read_tensors(path / MODEL_FILE, aliases=record.aliases[MODEL_FILE])
        tensors = tensor_file.read_tensors(
            path / OPTIMIZER_FILE, aliases=record.aliases[OPTIMIZER_FILE]
        )
        return Snapshot(
            step=record.step,
            model={name: model[name] for name in record.model},
            optimizer={
                name: encoding.decode(state, tensors=tensors)
                for name, state in record.optimizer.items()
            },
            groups=encoding.decode(record.groups, tensors=tensors),
            meta=encoding.decode(record.meta, tensors={}),
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}; {advise(path)}") from error


def verify(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path`` after comparing every file's checksum.

    Raises CheckpointError with the file, both checksums, and what to do.
    """
    try:
        record = manifest.read_manifest(path)
        manifest.check_contents(path, record)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advise(path)}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; {advise(path)}") from error
    return record


def _write_files(folder: Path, snapshot: Snapshot, *, serial: int) -> None:
    tensors: dict[str, Tensor] = {}
    optimizer = {
        name: encoding.encode(state, where=name, tensors=tensors)
        for name, state in snapshot.optimizer.items()
    }
    groups = encoding.encode(snapshot.groups, where="groups", tensors=tensors)
    meta = encoding.encode(snapshot.meta, where="meta")
    parts = {MODEL_FILE: snapshot.model, OPTIMIZER_FILE: tensors}
    aliases = {name: tensor_file.write_tensors(folder / name, part) for name, part in parts.items()}
    for name in parts:
        durable.sync_file(folder / name)
    record = Manifest(
        step=snapshot.step,
        serial=serial,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dearmpi=dearmpi.__version__,
        files={name: manifest.record_file(folder / name) for name in parts},
        model=list(snapshot.model),
        aliases=aliases,
        optimizer=optimizer,
        groups=groups,
        meta=meta,
    )
    durable.write_text(folder / manifest.FILE_NAME, manifest.to_text(record))


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; there is a complete checkpoint at every moment."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        if replaced.exists():
            remove(replaced)
        target.rename(replaced)
    temporary.rename(target)
    durable.sync_folder(target.parent)
    if replaced.exists():
        remove(replaced)


def _save_error(
    error: OSError | SafetensorError, target: Path, snapshot: Snapshot
) -> CheckpointError:
    # safetensors reports what the system said only in its text.
    found = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number not in DISK_FULL:
        return CheckpointError(f"cannot save {target}: {error}; earlier checkpoints are untouched")
    return CheckpointError(
        f"cannot save {target}: the disk is full or over quota; "
        f"{_needed_bytes(snapshot)} bytes are needed, {_free_bytes(target)} are free; earlier "
        "checkpoints are untouched: free space, or keep fewer of them, and resume"
    )


def _needed_bytes(snapshot: Snapshot) -> int:
    states = (value for state in snapshot.optimizer.values() for value in state.values())
    tensors = [*snapshot.model.values(), *(v for v in states if isinstance(v, Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def _free_bytes(target: Path) -> int:
    folder = next(parent for parent in target.parents if parent.exists())
    return shutil.disk_usage(folder).free
