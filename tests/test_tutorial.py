"""The tutorials' blocks, run as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.forks import forked
from tests.job import clean_environment
from tests.stand_in import stand_in

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
LIMIT_S = 240
SCRIPT = "digits.py"
DONE_BEFORE = r"bin/setup|\. |pip install"  # environments are set up before the tests
DEMO = ("bin/demo", "mpirun -n 2 dear-train run --max-steps 10 --batch-size 4")
# The page's job is killed in time because it has many steps; those that go on end sooner here.
FEWER = ("mpirun -n 3", f"sed -i s/num_steps=1000/num_steps=400/ {SCRIPT}; mpirun -n 3")
FEWER_LATER = ("num_steps=1200", "num_steps=700")
FIRST_OF_LOOP = "for step"  # from here on a block of Python replaces the script


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return re.findall(r"```(\w+)\n(.*?)```", (TUTORIALS / page).read_text(), re.DOTALL)


def changed(text: str, diff: str) -> str:
    """``text`` after the hunks of ``diff``, which ``@@`` parts; each must fit at one place."""
    for hunk in diff.split("@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        old = "".join(rest for sign, rest in lines if sign != "+")
        new = "".join(rest for sign, rest in lines if sign != "-")
        assert f"\n{text}".count(f"\n{old}") == 1, f"does not fit at one place:\n{hunk}"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def pattern(line: str) -> str:
    """What fits a line of output: numbers may be others, and ``...`` is anything."""
    parts = [re.sub(r"\d[\d,.]*", "@", part) for part in line.split("...")]
    return ".*".join(
        re.escape(part).replace("@", r"[\d,.]+").replace(r"\ ", r"\s") for part in parts
    )


@dataclass
class Reader:
    """Does what the page says, in a home of its own, and keeps what the last commands printed."""

    home: Path
    script: str = ""
    output: str = ""
    folder: Path = field(init=False)
    variables: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        commands = self.home / "bin"
        start = shlex.join(map(str, forked([sys.executable])))
        stand_in(commands / "python", f'exec {start} "$@"')
        stand_in(commands / "dear-train", f'exec {start} -m dearmpi.cli.main "$@"')
        paths = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.folder = self.home
        self.variables = clean_environment() | {
            "HOME": str(self.home),
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HYDRA_LAUNCHER": "fork",  # the other hosts are this one
        }

    def do(self, language: str, text: str) -> None:
        """One block."""
        match language:
            case "python":
                self.script = self.script.partition(FIRST_OF_LOOP)[0] + text
            case "diff":
                self.script = changed(self.script, text)
            case "sh":
                self.run(text)
            case "text":
                self.compare(text)
            case _:
                pytest.fail(f"nobody runs a block of {language}")

    def run(self, commands: str) -> None:
        """Run a block's commands; only setting up is left out, as it was done before the tests."""
        if SCRIPT in commands:
            (self.folder / SCRIPT).write_text(self.script.replace(*FEWER_LATER))
        lines = [line for line in commands.splitlines() if not re.match(DONE_BEFORE, line)]
        ended = subprocess.run(
            ["bash", "-e", "-c", "\n".join([*lines, "pwd"]).replace(*FEWER).replace(*DEMO)],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, ended.stdout
        *printed, folder = ended.stdout.splitlines()
        self.output, self.folder = "\n".join(printed), Path(folder)

    def compare(self, text: str) -> None:
        """Find each line of ``text`` in what the commands before it printed, in order."""
        rest = self.output
        for line in text.splitlines():
            found = re.search(pattern(line), rest)
            assert found, f"no line like {line!r} in\n{self.output}"
            rest = rest[found.end() :]


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    reader = Reader(tmp_path)
    losses = []
    for language, text in blocks("twenty-minutes.md"):
        reader.do(language, text)
        if "step 50  loss" in reader.output and language == "text":
            losses.append(reader.output)
    plain, on_two_ranks = losses
    assert plain == on_two_ranks


def test_the_first_ten_minutes_go_as_written(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    reader = Reader(tmp_path)
    for language, text in blocks("first-ten-minutes.md"):
        reader.do(language, text)
