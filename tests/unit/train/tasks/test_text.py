"""Reading text, holding part of it out, and the bigram entropy."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.errors import DataError
from dearmpi.train.tasks.text import (
    CHUNK_BYTES,
    MIN_CHUNKS,
    Corpus,
    bigram_entropy,
    read_corpus,
    split,
    standard_library_files,
    text_files,
)
from tests.codes import raises
from tests.unit.train.locked import refuse_to_list


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(*files: Path, max_bytes: int = 10**6, held_out_bytes: int = 10**6) -> Corpus:
    return read_corpus(
        list(files), max_bytes=max_bytes, held_out_bytes=held_out_bytes, min_chunk=10
    )


def tensor(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def test_the_standard_library_is_python_source_without_tests_or_other_packages() -> None:
    files = standard_library_files()
    names = {path.name for path in files}
    folders = {part for path in files for part in path.parts}
    assert {"argparse.py", "typing.py", "decoder.py"} <= names
    assert all(path.suffix == ".py" for path in files)
    assert not folders & {"site-packages", "idlelib", "tests", "__pycache__"}
    assert files == standard_library_files()


def test_a_python_without_its_sources_asks_for_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with raises(DataError, "data-insufficient", 0, "--data"):
        standard_library_files()


def test_folders_give_their_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.txt", "a.md", ".hidden", ".git/config", "c.txt"):
        write(tmp_path / name, "text")
    write(tmp_path / "b/program", b"\x7fELF\0\0")
    found = [str(path.relative_to(tmp_path)) for path in text_files([tmp_path])]
    assert found == ["a.md", "c.txt", "b/a.txt", "b/z.txt"]


def test_several_paths_are_read_in_the_order_given_and_a_named_file_as_it_is(
    tmp_path: Path,
) -> None:
    binary = write(tmp_path / "x.bin", b"\0\1")
    text = write(tmp_path / "folder/a.txt", "a")
    assert text_files([binary, tmp_path / "folder"]) == [binary, text]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with raises(DataError, "file-missing", tmp_path, "/nowhere"):
        text_files([tmp_path / "nowhere"])


def test_a_folder_without_text_is_named_with_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", b"\0\1")
    with raises(DataError, "data-insufficient", tmp_path, 1):
        text_files([tmp_path])


def test_what_may_not_be_looked_at_is_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt", "text")
    locked = write(tmp_path / "locked/b.txt", "text").parent
    with monkeypatch.context() as patch:
        refuse_to_list(locked, patch)
        with raises(DataError, "unreadable-file", locked):
            text_files([tmp_path])
    (locked / "link").symlink_to("a" * 300)
    with raises(DataError, "unreadable-file", locked, "/link"):
        text_files([tmp_path])


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "text")
    (tmp_path / "link").symlink_to("nowhere")
    assert text_files([tmp_path]) == [text]


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is played."""
    locked = write(tmp_path / "locked.txt", "x" * 1000)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with raises(DataError, "unreadable-file", locked):
        read(locked)


def test_too_little_text_is_refused_with_both_sizes(tmp_path: Path) -> None:
    short, empty = write(tmp_path / "short.txt", "x" * 150), write(tmp_path / "empty.txt", "")
    with raises(DataError, "data-insufficient", 150, 2, "empty.txt", 200):
        read(short, empty)


def test_reading_stops_at_the_most_bytes_allowed(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.txt", str(i) * 400) for i in range(5)]
    corpus = read(*files, max_bytes=1000)
    assert corpus.num_files == 3
    assert len(corpus.train) + len(corpus.held_out) == 1000


def test_the_digest_tells_texts_apart(tmp_path: Path) -> None:
    one = read(write(tmp_path / "1.txt", "a" * 500))
    same = read(write(tmp_path / "2.txt", "a" * 500))
    other = read(write(tmp_path / "3.txt", "a" * 499 + "b"))
    assert one.digest == same.digest != other.digest


@given(st.integers(MIN_CHUNKS, 6 * MIN_CHUNKS * CHUNK_BYTES), st.integers(1, 10**6))
def test_held_out_and_training_text_never_overlap_and_nothing_is_lost(
    size: int, held_out_bytes: int
) -> None:
    text = os.urandom(size)
    train, held_out = split(text, held_out_bytes)
    chunk = min(CHUNK_BYTES, size // MIN_CHUNKS)
    assert len(train) + len(held_out) == size
    assert chunk <= len(held_out) <= max(chunk, min(size // MIN_CHUNKS, held_out_bytes))
    assert len(held_out) % chunk == 0
    # Both parts are the text with whole chunks left out: walk it, taking each chunk from one.
    left_train, left_out = bytes(train.tolist()), bytes(held_out.tolist())
    for begin in range(0, size, chunk):
        piece = text[begin : begin + chunk]
        if left_out.startswith(piece) and not left_train.startswith(piece):
            left_out = left_out.removeprefix(piece)
        else:
            assert left_train.startswith(piece)
            left_train = left_train.removeprefix(piece)
    assert not left_out
    assert not left_train


def test_the_held_out_chunks_are_spread_over_the_text() -> None:
    text = b"".join(bytes([i]) * CHUNK_BYTES for i in range(200))
    held_out = split(text, 4 * CHUNK_BYTES)[1]
    assert sorted(set(held_out.tolist())) == [25, 75, 125, 175]


def test_bigram_entropy_of_a_cycle_is_almost_nothing() -> None:
    assert bigram_entropy(tensor(b"abcd" * 50_000), tensor(b"abcd" * 100)) < 0.01


def test_bigram_entropy_of_random_bytes_is_all_of_their_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 105, (200_000,), generator=generator).to(torch.uint8)
    entropy = bigram_entropy(letters[:190_000], letters[190_000:])
    assert entropy == pytest.approx(3.0, abs=0.01)


def test_bigram_entropy_knows_one_byte_of_context_and_no_more() -> None:
    """After a comes b or c with equal chances, and a after those: half a bit per byte."""
    generator = torch.Generator().manual_seed(0)
    coins = torch.randint(2, (100_000,), generator=generator)
    text = torch.stack((torch.full_like(coins, 97), 98 + coins), dim=1).flatten().to(torch.uint8)
    assert bigram_entropy(text[:150_000], text[150_000:]) == pytest.approx(0.5, abs=0.01)


def test_bigram_entropy_of_pairs_never_seen_is_large_but_finite() -> None:
    entropy = bigram_entropy(tensor(b"ab" * 1000), tensor(b"xyz" * 10))
    assert math.isfinite(entropy)
    assert entropy > 8
