"""Part file: one rank's part of a checkpoint as a safetensors file.

A safetensors file is the length of a header (8 bytes, little-endian), the header as JSON, and the
values; https://huggingface.co/docs/safetensors describes it. It is written here rather than by that
library, which would hold the interpreter's lock meanwhile and copy the values once more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dearmpi.errors import CheckpointError
from dearmpi.train.checkpoint.direct_file import BLOCK_BYTES, DirectFile
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import STORABLE, Part, Piece

ABOUT = "dearmpi"  # the key of the header's metadata under which all else than values stands
_CHUNK_BYTES = 4 << 20


def write_part(path: Path, part: Part) -> FileRecord:
    """Write ``part``, which must be a copy, to ``path`` and onto the disk; returns its checksum.

    Raises OSError when it cannot be written.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    with DirectFile(path) as file:
        for chunk in _chunks(part):
            file.write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(bytes=num_bytes, sha256=digest.hexdigest())


def read_parts(paths: Sequence[Path]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors whose pieces lie in ``paths``, whole, and each part's plain data.

    Raises CheckpointError where elements are missing or doubled; OSError, SafetensorError,
    KeyError, TypeError, ValueError or RuntimeError for files that are no parts.
    """
    flat: dict[str, Tensor] = {}
    layouts: dict[str, Piece] = {}
    covered: dict[str, int] = {}
    abouts = []
    for path in paths:
        part = _read_part(path)
        abouts.append(dict(part.about))
        for name, piece in part.pieces.items():
            numel = torch.Size(piece.shape).numel()
            layouts.setdefault(name, piece)
            whole = flat.setdefault(
                name, torch.empty(numel, dtype=piece.values.dtype, device="cpu")
            )
            whole[piece.start : piece.start + piece.values.numel()] = piece.values
            covered[name] = covered.get(name, 0) + piece.values.numel()
    for name, tensor in flat.items():
        if covered[name] != tensor.numel():
            raise CheckpointError(
                f"{paths[0].parent} holds {covered[name]} of {tensor.numel()} elements of {name}"
            )
    tensors = {
        name: tensor.as_strided(layouts[name].shape, layouts[name].stride)
        for name, tensor in flat.items()
    }
    return tensors, abouts


def _chunks(part: Part) -> Iterator[bytes | memoryview]:
    yield _header(part)
    data = part.data.numpy().data
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _header(part: Part) -> bytes:
    places = {name: [p.start, p.shape, p.stride] for name, p in part.pieces.items()}
    about = json.dumps({"pieces": places, **part.about}, allow_nan=False)
    # Readers of other libraries look at "format" to know whose tensors these are.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", ABOUT: about}}
    end = 0
    for name, piece in part.pieces.items():
        start, end = end, end + piece.values.nbytes
        header[name] = {
            "dtype": STORABLE[piece.values.dtype],
            "shape": [piece.values.numel()],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_BYTES)  # so that the values begin at a block
    return len(text).to_bytes(8, "little") + text


def _read_part(path: Path) -> Part:
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[ABOUT])
        pieces = {
            name: Piece(file.get_tensor(name), int(start), tuple(shape), tuple(stride))
            for name, (start, shape, stride) in about.pop("pieces").items()
        }
    return Part(pieces, about)
