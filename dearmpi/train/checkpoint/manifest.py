"""Manifest: the JSON file that makes a folder of tensor files a checkpoint.

It holds the format and its version, the size and SHA-256 of each rank's part, and a SHA-256 of its
own content. It also holds all plain data that is the same on all ranks.
docs/reference/checkpoints.md describes the fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from dearmpi.errors import CheckpointError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train.disk import file_bytes

FILE_NAME = "manifest.json"
FORMAT = "dearmpi checkpoint"
VERSION = 2


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Raise TypeError for a field of another type."""
        if type(self.bytes) is not int or not isinstance(self.sha256, str):
            raise TypeError(f"{self.bytes!r} and {self.sha256!r} are no size and checksum")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    serial: counts the checkpoints of a run in order of writing.
    written: time of writing, UTC, ISO 8601.
    dearmpi: version that wrote it.
    files: by name within the folder.
    model: names of the model's tensors, in the order of its state dict.
    aliases: the names of the model's tied tensors with the name under which each is stored.
    groups, meta: as in the snapshot, encoded.
    """

    step: int
    serial: int
    written: str
    dearmpi: str
    files: dict[str, FileRecord]
    model: list[str]
    aliases: dict[str, str]
    groups: list[dict[str, Any]]
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        """Raise TypeError for a field of another type: JSON from elsewhere may hold anything."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, not {kind.__name__}")
        for name in self.files:
            if Path(name).name != name:
                raise TypeError(f"{name!r} is no file in the folder")


_KINDS: dict[str, type] = {
    "step": int,
    "serial": int,
    "written": str,
    "dearmpi": str,
    "files": dict,
    "model": list,
    "aliases": dict,
    "groups": list,
    "meta": dict,
}


def part_name(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"part-{rank:05d}.safetensors"


def record_file(path: Path) -> FileRecord:
    """Measure the file at ``path``, reading all of it."""
    with regular_file(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(bytes=file.tell(), sha256=digest)


def to_text(manifest: Manifest) -> str:
    """Return the JSON text of ``manifest``."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``folder``.

    Raises CheckpointError when it is missing, damaged, or of another format version.
    """
    path = folder / FILE_NAME
    body = _read_body(path)
    stored = body.pop("sha256", None)
    actual = _digest(body)
    if stored != actual:
        raise CheckpointError(
            f"{path} is corrupted: SHA-256 {short(actual)}, expected {short(str(stored))}",
            code="checkpoint-damaged",
        )
    if body.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} is not the manifest of a {FORMAT}", code="checkpoint-damaged"
        )
    version = body.pop("version", None)
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this dearmpi reads version {VERSION}; "
            f"use the dearmpi that wrote it ({body.get('dearmpi', 'unknown')})",
            code="other-format-version",
        )
    try:
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        return Manifest(files=files, **body)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: a field is missing or unknown ({error})", code="checkpoint-damaged"
        ) from error


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise CheckpointError unless each of ``files`` is in ``folder`` with its size."""
    for name, record in files.items():
        path = folder / name
        actual = file_bytes(path)
        if actual is None:
            raise CheckpointError(
                f"{path} is missing ({record.bytes} bytes expected)", code="checkpoint-damaged"
            )
        if actual != record.bytes:
            change = "truncated" if actual < record.bytes else "too long"
            raise CheckpointError(
                f"{path} is {change}: {actual} of {record.bytes} bytes", code="checkpoint-damaged"
            )


def check_contents(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise CheckpointError unless each of ``files`` has its size and its checksum."""
    check_sizes(folder, files)
    for name, record in files.items():
        actual = record_file(folder / name)
        if actual != record:
            raise CheckpointError(
                f"{folder / name} is corrupted: SHA-256 {short(actual.sha256)}, "
                f"expected {short(record.sha256)}",
                code="checkpoint-damaged",
            )


def short(digest: str) -> str:
    """Return the first digits of a checksum, enough to distinguish two."""
    return digest[:12]


def _read_body(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(regular_file(path).read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: not a complete checkpoint", code="no-checkpoint"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{path.parent} is not a folder, so not a checkpoint", code="no-checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}", code="unreadable-file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: not JSON ({error})", code="checkpoint-damaged"
        ) from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object", code="checkpoint-damaged")
    return body


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _digest(body: dict[str, Any]) -> str:
    """Checksum of the content, whatever its white space."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(value: Any, *, where: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return ``value`` as strict JSON can hold it; ``decode`` restores it exactly.

    JSON has no tuples, NaN, infinity, tensors, or mappings with keys other than text. These become
    objects with one key that starts with ``$``::

        (0.9, 0.999)     {"$tuple": [0.9, 0.999]}
        float("inf")     {"$float": "inf"}
        {30: 0.1}        {"$dict": [[30, 0.1]]}
        a tensor         {"$tensor": "name"}; the tensor itself goes into ``tensors``

    Finite floats are JSON numbers; Python writes the shortest decimal that reads back bit for bit.


    where: a path such as ``groups/0/lr``, for messages and as the name of a tensor.
    tensors: receives tensors by name; None refuses them.
    Raises CheckpointError for a value that is no plain data.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.generic):
        return encode(value.item(), where=where, tensors=tensors)
    if isinstance(value, Tensor) and tensors is not None:
        return {"$tensor": _keep(value, where, tensors)}
    if isinstance(value, (list, tuple)):
        items = [encode(v, where=f"{where}/{i}", tensors=tensors) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use numbers, text, None, and tuples, lists or mappings of them",
        code="value-not-storable",
    )


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    name = where
    while name in tensors:  # parameter names may contain slashes of their own
        name += "'"
    tensors[name] = tensor
    return name


def _encode_mapping(
    value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor] | None
) -> dict[str, Any]:
    items = [
        (encode(k, where=where), encode(v, where=f"{where}/{k}", tensors=tensors))
        for k, v in value.items()
    ]
    if all(isinstance(k, str) and not k.startswith("$") for k in value):
        return dict(items)
    return {"$dict": [list(item) for item in items]}


def decode(value: Any, *, tensors: Mapping[str, Tensor]) -> Any:
    """Undo ``encode``; tensors: as it collected them. Raises KeyError for an unknown name."""
    if isinstance(value, list):
        return [decode(item, tensors=tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", text)]:
            return float(text)
        case [("$tensor", name)]:
            return tensors[name]
        case [("$tuple", items)]:
            return tuple(decode(item, tensors=tensors) for item in items)
        case [("$dict", items)]:
            return {decode(k, tensors=tensors): decode(v, tensors=tensors) for k, v in items}
    return {key: decode(item, tensors=tensors) for key, item in value.items()}
