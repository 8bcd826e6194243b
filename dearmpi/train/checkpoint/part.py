"""Part: what one rank writes of a checkpoint, as pieces of tensors and plain data.

Tensors that are the same on all ranks are divided by elements, so that every rank writes as much;
of sharded ones each rank writes what it owns.

It is one safetensors file: the length of a header (8 bytes, little-endian), the header as JSON, and
the values; https://huggingface.co/docs/safetensors describes it. It is written here rather than by
that library, which would hold the interpreter's lock meanwhile and copy the values once more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dearmpi.cuts import balanced_cuts
from dearmpi.engine.bucket.buffers import flattened, is_dense
from dearmpi.engine.state.sharded_state import StatePiece
from dearmpi.errors import CheckpointError
from dearmpi.train.checkpoint import manifest
from dearmpi.train.checkpoint.manifest import FileRecord
from dearmpi.train.checkpoint.snapshot import Snapshot, find_aliases

BLOCK_BYTES = 4096  # disks need addresses, offsets and sizes to be multiples of it

STORABLE: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Neighbouring elements of a tensor.

    values: 1-D, in the memory order of the whole tensor.
    start: the first of them. shape, stride: of the whole tensor.
    """

    values: Tensor
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor, *, start: int, like: Tensor) -> TensorPiece:
        """``values`` as the elements from ``start`` on of a tensor shaped like ``like``."""
        stride = like.stride() if is_dense(like) else torch.empty(like.shape).stride()
        return cls(values, start, tuple(like.shape), stride)


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One rank's part.

    pieces: by the name of the tensor. about: plain data that JSON can hold.
    data: the values of all pieces, one after the other, once they are copied.
    """

    pieces: Mapping[str, TensorPiece]
    about: Mapping[str, Any]
    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))

    @property
    def num_bytes(self) -> int:
        """Size of all values."""
        return sum(piece.values.nbytes for piece in self.pieces.values())


class CopyBuffer:
    """Memory for the copy of a part, made at the first and used again for every other one."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def copy(self, part: CheckpointPart) -> CheckpointPart:
        """``part`` with values of its own. The copy before it must not be in use any more."""
        if self._data.numel() < part.num_bytes:
            room = torch.empty(part.num_bytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
            self._data = room[-room.data_ptr() % BLOCK_BYTES :]  # as DirectFile asks
        pieces: dict[str, TensorPiece] = {}
        end = 0
        # Wide elements first: each piece then begins at a multiple of its element size.
        names = sorted(part.pieces, key=lambda name: -part.pieces[name].values.itemsize)
        for name in names:
            values = part.pieces[name].values
            start, end = end, end + values.nbytes
            copied = self._data[start:end].view(values.dtype)
            copied.copy_(values)
            pieces[name] = replace(part.pieces[name], values=copied)
        return CheckpointPart(pieces, part.about, self._data[:end])


def divide(tensors: Mapping[str, Tensor], *, rank: int, size: int) -> dict[str, TensorPiece]:
    """The share of ``rank`` in tensors that all ``size`` ranks hold alike, equal up to an element.

    Raises CheckpointError, with the name, for a tensor that a checkpoint cannot hold.
    """
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    total = sum(tensor.numel() for tensor in tensors.values())
    first, last = balanced_cuts(total, size).range_of(rank)
    pieces: dict[str, TensorPiece] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel()
        start, stop = max(first, begin), min(last, end)
        if start < stop or (rank == 0 and tensor.numel() == 0):
            values = flattened(tensor)[max(0, start - begin) : max(0, stop - begin)]
            pieces[name] = TensorPiece.of(values, start=max(0, start - begin), like=tensor)
    return pieces


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, with the name, for a tensor that a checkpoint cannot hold."""
    if tensor.dtype not in STORABLE or tensor.layout != torch.strided:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype} in {tensor.layout} layout, which safetensors "
            "cannot hold; convert it to a dense tensor of a common dtype",
            code="value-not-storable",
        )


@dataclass(frozen=True, slots=True)
class Head:
    """The manifest's content beside the files, encoded; fields as in ``Manifest``."""

    model: Sequence[str]
    aliases: Mapping[str, str]
    groups: Sequence[dict[str, Any]]
    meta: Mapping[str, Any]


def make_head(snapshot: Snapshot) -> Head:
    """The head of the checkpoint of ``snapshot``; of its model only the names count."""
    return Head(
        model=list(snapshot.model),
        aliases=find_aliases(snapshot.model),
        groups=manifest.encode(snapshot.groups, where="groups", tensors={}),
        meta=manifest.encode(snapshot.meta, where="meta"),
    )


def make_part(
    snapshot: Snapshot,
    *,
    shards: Sequence[StatePiece] = (),
    owned: Mapping[str, Mapping[str, Any]] | None = None,
    rank: int = 0,
    size: int = 1,
) -> CheckpointPart:
    """The part of ``rank``: its share of ``snapshot``, the same on all ranks, and its own shards
    of the optimizer's state. Values are not copied.

    owned: by parameter name, state that this rank alone holds.

    Raises CheckpointError for values that a checkpoint cannot hold.
    """
    tied = find_aliases(snapshot.model)
    common = {model_key(name): t for name, t in snapshot.model.items() if name not in tied}
    state: dict[str, Tensor] = {}
    described = {
        name: manifest.encode(entries, where=_state_key(name), tensors=state)
        for name, entries in snapshot.optimizer.items()
    }
    manifest.encode(snapshot.groups, where="groups", tensors=state)
    pieces = divide(common, rank=rank, size=size) | divide(state, rank=rank, size=size)
    for shard in shards:
        described.setdefault(shard.name, {}).update(_add_shard(shard, pieces))
    for name, entries in (owned or {}).items():
        own: dict[str, Tensor] = {}
        encoded = manifest.encode(dict(entries), where=_state_key(name), tensors=own)
        described.setdefault(name, {}).update(encoded)
        pieces.update(divide(own, rank=0, size=1))
    return CheckpointPart(pieces, {"optimizer": described, "random": (snapshot.random or [{}])[0]})


def model_key(name: str) -> str:
    """The name under which the model's tensor ``name`` is stored."""
    return f"model/{name}"


def _state_key(name: str) -> str:
    return f"optimizer/{name}"


def _add_shard(shard: StatePiece, pieces: dict[str, TensorPiece]) -> dict[str, Any]:
    """Add a shard's tensors to ``pieces``; returns its entries, encoded."""
    described: dict[str, Any] = {}
    for key, values in shard.tensors.items():
        name = f"{_state_key(shard.name)}/{key}"
        check_storable(name, values)
        pieces[name] = TensorPiece.of(values, start=shard.start, like=shard.param)
        described[key] = {"$tensor": name}
    if shard.start == 0:  # the owner of the first element describes the parameter as a whole
        scalars: dict[str, Tensor] = {}
        described |= manifest.encode(
            dict(shard.scalars), where=_state_key(shard.name), tensors=scalars
        )
        pieces.update(divide(scalars, rank=0, size=1))
    return described


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
