"""Text as bytes: a corpus, its held-out part, and the entropy that a model must beat."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dearmpi.errors import DataError
from dearmpi.train.disk import files_below, is_file, is_folder

CHUNK_BYTES = 4096
MIN_CHUNKS = 20

# Folders of the standard library that hold tests, tables or other people's packages, not prose.
_SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "encodings",
        "pydoc_data",
    }
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two parts that do not overlap.

    train, held_out: bytes as 1-D uint8 tensors.
    num_files: files the text was read from.
    is_cut: whether there is more text than was to be read.
    digest: eight hexadecimal digits of the whole text's SHA-256, to distinguish corpora.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    digest: str
    is_cut: bool = False


def standard_library_files() -> list[Path]:
    """Python sources of this interpreter's standard library, in an order of their names alone.

    Raises DataError where the interpreter comes without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in files_below(root, skipped=_SKIPPED_FOLDERS)
        # The build's own record differs from machine to machine.
        if path.suffix == ".py"
        and not path.name.startswith("_sysconfigdata")
        and is_file(path, DataError)
    ]
    if not files:
        raise DataError(
            f"this Python has no standard library sources in {root} (0 .py files); "
            "name a text to train on with --data PATH",
            code="data-insufficient",
        )
    return files


def text_files(paths: Iterable[Path]) -> list[Path]:
    """The files named by ``paths``, with folders replaced by the text files below them.

    In folders, hidden entries and files with zero bytes (programs, archives, pictures) are passed
    over; a file named directly is taken as it is. Raises DataError for a missing path, a folder
    without text, and what cannot be looked at.
    """
    files: list[Path] = []
    for path in paths:
        if is_file(path, DataError):
            files.append(path)
        elif is_folder(path, DataError):
            below = [file for file in files_below(path) if is_file(file, DataError)]
            found = [file for file in below if not _is_binary(file)]
            if not found:
                raise DataError(
                    f"folder {path} holds no text: {len(below)} files below it, "
                    "none of them text; name a file or folder with text",
                    code="data-insufficient",
                )
            files.extend(found)
        else:
            raise DataError(
                f"there is no file or folder {path}; give the path of a text", code="file-missing"
            )
    return files


def _is_binary(path: Path) -> bool:
    return b"\0" in _read(path, CHUNK_BYTES)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", code="unreadable-file") from error


def read_corpus(
    files: Sequence[Path], *, max_bytes: int, held_out_bytes: int, min_chunk: int
) -> Corpus:
    """Read ``files`` in order, up to ``max_bytes`` in all, and hold out part of their text.

    held_out_bytes: most that is held out, or one chunk; never above a twentieth of the text.
    min_chunk: bytes that either part must hold at least.

    Raises DataError for a file that cannot be read, and for too little text.
    """
    pieces: list[bytes] = []
    left = max_bytes + 1  # one more tells whether there is more
    for path in files:
        if left <= 0:
            break
        pieces.append(_read(path, left))
        left -= len(pieces[-1])
    if left <= 0 and len(pieces[-1]) == 1:  # not a file that the text is from
        pieces.pop()
    text = b"".join(pieces)[:max_bytes]
    needed = MIN_CHUNKS * min_chunk
    if len(text) < needed:
        names = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise DataError(
            f"too little text: {len(text)} bytes in {len(pieces)} files ({names}); "
            f"at least {needed} are needed: name more text, allow more bytes, or use a "
            "shorter context",
            code="data-insufficient",
        )
    train, held_out = split(text, held_out_bytes)
    if len(held_out) < min_chunk:
        raise DataError(
            f"{len(held_out)} bytes of {len(text)} are held out, but {min_chunk} are needed to "
            "evaluate on: hold out more (eval_bytes), name more text, allow more bytes, or use a "
            "shorter context",
            code="data-insufficient",
        )
    digest = hashlib.sha256(text).hexdigest()[:8]
    return Corpus(
        train=train, held_out=held_out, num_files=len(pieces), digest=digest, is_cut=left <= 0
    )


def split(text: bytes, held_out_bytes: int) -> tuple[Tensor, Tensor]:
    """Cut ``text`` into chunks and hold some out, evenly spread: (train, held out) as uint8.

    At least one chunk and at most a twentieth of them is held out. A text of fewer bytes than
    chunks has no such split.
    """
    array = np.frombuffer(text, dtype=np.uint8)
    chunk = min(CHUNK_BYTES, len(array) // MIN_CHUNKS)
    assert chunk > 0, "the caller checks the length"
    num_chunks = len(array) // chunk
    num_held_out = max(1, min(num_chunks // MIN_CHUNKS, held_out_bytes // chunk))
    held_out = np.zeros(len(array), dtype=np.bool_)
    for place in range(num_held_out):
        begin = chunk * ((2 * place + 1) * num_chunks // (2 * num_held_out))
        held_out[begin : begin + chunk] = True
    return torch.from_numpy(array[~held_out]), torch.from_numpy(array[held_out])


_PRIOR = 16.0  # counts of a row


def bigram_entropy(train: Tensor, held_out: Tensor) -> float:
    """Bits per byte of ``held_out`` under the bigram model counted in ``train``.

    Each row of counts is smoothed by a few counts, spread as the single bytes are; these are
    smoothed by one count each. So pairs that the training text lacks have a probability.
    """
    counts = _pair_counts(train)
    single = np.bincount(train.numpy(), minlength=256) + 1.0
    single /= single.sum()
    rows = counts.sum(axis=1, keepdims=True)
    probability = (counts + _PRIOR * single) / (rows + _PRIOR)
    seen = _pair_counts(held_out)
    return float(-(seen * np.log2(probability)).sum() / seen.sum())


def _pair_counts(text: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    values = text.numpy().astype(np.int64)
    pairs = np.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256)
    return pairs.reshape(256, 256).astype(np.float64)
