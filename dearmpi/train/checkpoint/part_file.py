"""Part file: one rank's part of a checkpoint as a safetensors file.

A safetensors file is the length of a header (8 bytes, little-endian), the header as JSON, and the
values; https://huggingface.co/docs/safetensors describes it. It is written here rather than by that
library, which would hold the interpreter's lock meanwhile and copy the values once more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dearmpi.errors import CheckpointError
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.part import BLOCK_BYTES, STORABLE, CheckpointPart, TensorPiece


class DirectFile:
    """Writes the new file at ``path`` past the kernel's page cache; a context manager.

    Copying into the page cache costs several times the CPU time of the checksums. A checkpoint that
    is not read soon would also push useful pages out. A regular exit leaves all data on the disk.

    Raises OSError when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; whole blocks go past the cache where the system can.

        That needs ``data`` to begin at a multiple of BLOCK_BYTES in memory and in the file.
        """
        view = memoryview(data)
        num_whole = len(view) - len(view) % BLOCK_BYTES
        if num_whole and self._set_direct(wanted=True):
            try:
                written = os.write(self._descriptor, view[:num_whole])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                written = 0  # some part of the system asks for more than whole blocks
            view = view[written:]
        self._set_direct(wanted=False)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _set_direct(self, *, wanted: bool) -> bool:
        """Whether writes now go past the cache, which not every file system can."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT * wanted)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted


ABOUT = "dearmpi"  # the key of the header's metadata under which all else than values stands
_CHUNK_BYTES = 4 << 20


def write_part(path: Path, part: CheckpointPart) -> FileRecord:
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
    layouts: dict[str, TensorPiece] = {}
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
                f"{paths[0].parent} holds {covered[name]} of {tensor.numel()} elements of {name}",
                code="checkpoint-damaged",
            )
    tensors = {
        name: tensor.as_strided(layouts[name].shape, layouts[name].stride)
        for name, tensor in flat.items()
    }
    return tensors, abouts


def _chunks(part: CheckpointPart) -> Iterator[bytes | memoryview]:
    yield _header(part)
    data = part.data.numpy().data
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _header(part: CheckpointPart) -> bytes:
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


def _read_part(path: Path) -> CheckpointPart:
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[ABOUT])
        pieces = {
            name: TensorPiece(file.get_tensor(name), int(start), tuple(shape), tuple(stride))
            for name, (start, shape, stride) in about.pop("pieces").items()
        }
    return CheckpointPart(pieces, about)
