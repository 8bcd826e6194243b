"""What a run tells the person who started it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
import torch

from dearmpi.cli.console import Console, bar, duration
from dearmpi.cli.main import main
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import Snapshot
from tests.unit.report.example_run import ExampleRun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_rank_that_speaks_prints() -> None:
    out = io.StringIO()
    Console(speaks=False, out=out).say("a")
    assert out.getvalue() == ""
    Console(speaks=True, out=out).say("a", "b")
    assert out.getvalue() == "a\nb\n"


def test_there_is_no_live_line_where_nobody_watches() -> None:
    out = io.StringIO()
    console = Console(speaks=True, out=out)
    console.show("50 %")
    console.say("a")
    console.finish()
    assert out.getvalue() == "a\n"


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_under_a_launcher_the_live_line_goes_where_that_writes(
    monkeypatch: pytest.MonkeyPatch, out: io.StringIO
) -> None:
    for terminal, shown in ((None, ""), (Path("/dev/pts/none"), "50 %")):
        monkeypatch.setattr("dearmpi.cli.console.launcher_terminal", lambda _, to=terminal: to)
        out.truncate(0)
        out.seek(0)
        Console(speaks=True, launched=True, out=out).show("50 %")
        assert out.getvalue() == shown


def test_the_live_line_stays_below_what_is_said_and_goes_at_the_end() -> None:
    out = Terminal()
    console = Console(speaks=True, out=out)
    console.show("50 %")
    console.say("saved")
    console.finish()
    assert out.getvalue() == "50 %\r\x1b[Ksaved\n50 %\r\x1b[K"


def test_the_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    Console(speaks=True, out=out).show("x" * 50)
    assert out.getvalue() == "x" * 19


def test_what_does_not_fit_the_terminal_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    Console(speaks=True, out=out).show("12/60", "1 min left", "hidden 10%")
    assert out.getvalue() == "12/60  1 min left"


def test_a_bar_is_filled_as_far_as_the_run_is() -> None:
    assert [bar(done, 4, width=4) for done in (0, 2, 4)] == ["····", "██··", "████"]


def test_a_bar_shows_how_far_where_an_encoding_lacks_its_signs() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    console = Console(speaks=True, out=out)
    assert bar(2, 4, width=4, encoding=console.encoding) == "##.."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.14, "3.1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_are_told_as_people_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_training_goes_on_where_nobody_listens_any_more() -> None:
    """As behind ``| head``."""
    listens, speaks = os.pipe()
    with open(speaks, "w", encoding="utf-8") as out:
        console = Console(speaks=True, out=out)
        console.say("a")
        assert os.read(listens, 10) == b"a\n"
        os.close(listens)
        for _ in range(3):
            console.say("b")
            console.finish()
        assert not console.speaks


def test_what_an_encoding_lacks_is_no_failure() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="latin-1")
    Console(speaks=True, out=out).say("50 % " + bar(1, 2, width=2), "\ufffd")
    assert raw.getvalue() == "50 % ?·\n?\n".encode("latin-1")


def test_a_full_disk_is_a_failure_of_what_was_asked_for() -> None:
    out = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    console = Console(speaks=True, needed=True, out=out)
    try:
        with pytest.raises(OSError, match="No space left"):
            console.say("a")
    finally:
        with contextlib.suppress(OSError):
            out.close()  # tries once more
    assert console.speaks


def test_a_full_disk_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "w", encoding="utf-8") as out:
        console = Console(speaks=True, out=out)
        for _ in range(2):
            console.say("a")
    assert not console.speaks
    assert caplog.text.count("the console is gone: [Errno 28] No space left") == 1


def test_without_standard_output_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``>&-``."""
    monkeypatch.setattr("sys.stdout", None)
    for launched in (False, True):
        console = Console(speaks=True, launched=launched)
        console.say("a")
        console.show("50 %")
        console.finish()
        assert not console.is_live


def test_a_name_that_an_encoding_lacks_is_told_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ExampleRun().write(tmp_path, name="\N{GREEK CAPITAL LETTER OMEGA}")
    checkpoint.save(run, Snapshot(7, {"w": torch.ones(2)}, {}, [], {}))
    monkeypatch.setitem(sys.modules, "PIL", None)
    for command in (
        ["report", str(run)],
        ["trace", "merge", str(run)],
        ["checkpoint", "show", str(run)],
        ["checkpoint", "export", str(run), str(run / "model.pt")],
    ):
        out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
        monkeypatch.setattr("sys.stdout", out)
        assert main(command) == 0
        assert f"{tmp_path}/?" in out.buffer.getvalue().decode("latin-1")
