"""Whether somebody watches what a launcher writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.cli.console import count_columns, launcher_terminal


def add_process(
    processes: Path, pid: int, parent: int, *words: str, name: str, output: str
) -> None:
    folder = processes / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1")
    (folder / "cmdline").write_text("\0".join([*words, ""]))
    (folder / "fd" / "1").symlink_to(output)


@pytest.mark.parametrize(
    ("name", "words", "output", "is_seen"),
    [
        ("mpirun", (), "/dev/pts/3", True),
        ("prterun", (), "/dev/tty1", True),
        ("mpiexec.hydra", (), "pipe:[17]", False),
        ("mpirun", (), "/home/me/log.txt", False),
        ("mpirun", ("-l",), "/dev/pts/3", False),
        ("bash", (), "/dev/pts/3", False),
    ],
)
def test_what_counts_is_where_the_launcher_writes(
    tmp_path: Path, name: str, words: tuple[str, ...], output: str, is_seen: bool
) -> None:
    add_process(tmp_path, 30, 20, name="a proxy) (of 1", output="pipe:[5]")
    add_process(tmp_path, 20, 10, name, *words, name=name, output=output)
    add_process(tmp_path, 10, 1, name="bash", output="/dev/pts/3")
    found = launcher_terminal(30, processes=tmp_path)
    assert found == (Path(output) if is_seen else None)


def test_a_launcher_that_cannot_be_seen_is_none(tmp_path: Path) -> None:
    assert launcher_terminal(30, processes=tmp_path) is None


def test_a_terminal_that_does_not_tell_its_width_has_the_usual_one(tmp_path: Path) -> None:
    assert count_columns(tmp_path / "none") == 80
