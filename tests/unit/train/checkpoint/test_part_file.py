"""Direct file: its content is what was written, whatever the system can and however it comes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch

from dearmpi.train.checkpoint.part import BLOCK_BYTES, DirectFile


def blocks(num_bytes: int) -> memoryview:
    """Bytes of many values that begin at a block in memory."""
    room = torch.arange(num_bytes + BLOCK_BYTES).to(torch.uint8)
    start = -room.data_ptr() % BLOCK_BYTES
    return room[start : start + num_bytes].numpy().data


@pytest.mark.parametrize("system", ["as it is", "refuses the flag", "refuses the write", "is slow"])
@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (BLOCK_BYTES, 3 * BLOCK_BYTES, BLOCK_BYTES // 2),
        (10, 2 * BLOCK_BYTES),  # the second begins inside a block
        (2 * BLOCK_BYTES + 1, BLOCK_BYTES),
    ],
)
def test_the_content_is_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], system: str
) -> None:
    write, control = os.write, fcntl.fcntl

    def refuse_flag(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    def write_otherwise(descriptor: int, data: memoryview) -> int:
        if system == "is slow":
            return write(descriptor, data[: len(data) // 2 or 1])
        if control(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    if system == "refuses the flag":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    elif system != "as it is":
        monkeypatch.setattr(os, "write", write_otherwise)
    chunks = [blocks(size) for size in sizes]
    with DirectFile(tmp_path / "file") as file:
        for chunk in chunks:
            file.write(chunk)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DirectFile(tmp_path / "file") as file:
        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(OSError, match="No space left"):
            file.write(blocks(BLOCK_BYTES))
