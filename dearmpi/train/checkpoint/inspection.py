"""Inspection: a checkpoint described for people, and its model exported for inference."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dearmpi.errors import CheckpointError, ConfigError
from dearmpi.train import disk
from dearmpi.train.checkpoint.manifest import short
from dearmpi.train.checkpoint.store import load, verify
from dearmpi.train.checkpoint.survey import list_checkpoints, list_runs, resolve, survey

_AVERAGED = "@states/@ema/module."  # where a run with --ema keeps its average
SAFETENSORS_SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth")


def describe(path: Path) -> list[str]:
    """Return lines about the checkpoint at ``path`` (or the latest of that run folder).

    Every checksum is verified. Raises CheckpointError when the checkpoint is damaged.
    """
    folder = resolve(path)
    record = verify(folder)
    paths = [folder / name for name in record.files]
    lines = [
        f"checkpoint {folder}",
        f"step {record.step}, written {record.written} by dearmpi {record.dearmpi}",
        *_describe_meta(record.meta),
        f"model: {_describe_tensors(paths, 'model/')}",
    ]
    lines += [f"  {name} is tied to {owner}" for name, owner in record.aliases.items()]
    lines.append(f"optimizer: {_describe_tensors(paths, 'optimizer/')}")
    for number, group in enumerate(record.groups):
        lines.append(f"  group {number}: {len(group['params'])} parameters, lr {group.get('lr')}")
    for name, file in record.files.items():
        lines.append(f"{name}: {file.bytes} bytes, SHA-256 {short(file.sha256)} verified")
    return lines


def describe_runs(folder: Path) -> list[tuple[str, ...]]:
    """Rows for the runs in ``folder``, with a header; none if it holds no runs, or is one.

    A row has step and time of the checkpoint to resume from, the number of complete ones, and what
    is wrong. Checksums are not verified.
    """
    rows = [_describe_run(run) for run in list_runs(folder)]
    return [("run", "step", "written", "checkpoints", "remarks"), *rows] if rows else []


def _describe_run(run: Path) -> tuple[str, ...]:
    try:
        complete, _ = list_checkpoints(run / "checkpoints")
        found = survey(run)
    except CheckpointError as error:
        return (run.name, "-", "-", "-", str(error))
    remarks = "; ".join(found.passed_over)
    if found.latest is None:
        return (run.name, "-", "-", "0", remarks or "no checkpoint yet")
    record = complete[found.latest]
    return (run.name, str(record.step), record.written, str(len(complete)), remarks)


def export(path: Path, destination: Path, *, overwrite: bool = False) -> None:
    """Write the model of the checkpoint at ``path`` (or the latest of that run folder) to
    ``destination``: a plain state dict, one tensor per name, also where weights are tied. Of a run
    with ``--ema`` that is the moving average.

    destination: ends in ``.safetensors``, or in ``.pt`` or ``.pth`` for ``torch.load``.
    Raises ConfigError for another ending or a file that exists, CheckpointError when the
    checkpoint is damaged or the file cannot be written.
    """
    if destination.suffix not in (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES):
        raise ConfigError(
            f"the format of {destination} is unknown; end its name in {SAFETENSORS_SUFFIX}, "
            f"{' or '.join(TORCH_SUFFIXES)}",
            code="unknown-choice",
        )
    if os.path.exists(destination) and not overwrite:
        raise ConfigError(
            f"{destination} exists; name another file, or give --overwrite", code="file-exists"
        )
    stored = load(resolve(path)).model
    model = {name: tensor for name, tensor in stored.items() if not name.startswith("@")}
    averaged = {name: stored.get(f"{_AVERAGED}{name}") for name in model}
    model = {name: model[name] if mean is None else mean for name, mean in averaged.items()}
    temporary = destination.with_name(f".{destination.name}.writing")
    try:
        _write_model(temporary, model, suffix=destination.suffix)
        disk.sync_file(temporary)
        temporary.replace(destination)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {destination}: {error}", code="cannot-write"
        ) from error
    finally:
        with suppress(OSError):  # what cannot be written can likely not be removed
            temporary.unlink(missing_ok=True)


def _write_model(path: Path, model: Mapping[str, Tensor], *, suffix: str) -> None:
    if suffix in TORCH_SUFFIXES:
        torch.save(dict(model), path)
        return
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; save_file puts one for its user alone there
    # Readers of other libraries look at this key to know whose tensors these are.
    save_file(_separate(model), path, metadata={"format": "pt"})
    path.chmod(mode)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU that do not overlap, copied only where needed."""
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name in sorted(packed, key=lambda name: packed[name].data_ptr()):
        start = packed[name].data_ptr()
        stop = start + packed[name].nbytes
        if start < end:
            packed[name] = packed[name].clone()
        end = max(end, stop)
    return packed


def _describe_meta(meta: Mapping[str, Any]) -> list[str]:
    """One line per plain value; settings are listed, states of any size only counted."""
    lines = []
    for key, value in meta.items():
        if isinstance(value, dict) and key in ("config", "configuration"):
            lines.append(f"{key}:")
            lines += [f"  {name}: {setting}" for name, setting in value.items()]
        elif isinstance(value, (dict, list)):
            lines.append(f"{key}: {len(value)} entries")
        else:
            lines.append(f"{key}: {value}")
    return lines


def _describe_tensors(paths: Iterable[Path], prefix: str) -> str:
    """Of the tensors whose names begin with ``prefix``, and whose pieces lie in ``paths``."""
    num_elements = 0
    names: set[str] = set()
    dtypes: dict[str, None] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(prefix):
                    piece = file.get_slice(name)
                    names.add(name)
                    num_elements += torch.Size(piece.get_shape()).numel()
                    dtypes[piece.get_dtype()] = None
    return f"{len(names)} tensors, {num_elements} elements, {' '.join(dtypes) or 'no data'}"
