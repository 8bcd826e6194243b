"""The last output of a process reaches its readers, and waits for none in vain."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dearmpi.comm.api import safe_output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_words_in_a_pipe_are_waited_for_until_they_are_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"a wrong turn")
    waiter = threading.Thread(
        target=safe_output.wait_until_read, kwargs={"patience_s": 60, "descriptors": [writer]}
    )
    waiter.start()
    waiter.join(timeout=0.1)
    assert waiter.is_alive()
    assert os.read(reader, 100) == b"a wrong turn"
    waiter.join(timeout=30)
    assert not waiter.is_alive()


def test_a_reader_that_reads_no_more_is_given_up(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"a wrong turn")
    safe_output.wait_until_read(patience_s=0.01, descriptors=[pipe[1]])


def test_nobody_waits_for_a_file_or_for_what_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "words").open("wb+") as file:
        file.write(b"a wrong turn")
        file.flush()
        file.seek(0)  # where as much is left to read
        safe_output.wait_until_read(patience_s=1e9, descriptors=[file.fileno()])
        closed = file.fileno()
    safe_output.wait_until_read(patience_s=1.0, descriptors=[closed])  # perhaps reopened meanwhile


def test_lines_are_written_in_one_piece() -> None:
    """Else what another rank says at the same time comes between a line and its end."""

    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    safe_output.write("a wrong turn\nand another", stream=Pieces())
    assert pieces == ["a wrong turn\nand another\n"]
