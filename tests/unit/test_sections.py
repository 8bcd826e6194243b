"""Sections of `bin/test`, beside each other: nothing of what they print is lost."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from tests.sections import (
    BY_NAME,
    PARTS,
    Runner,
    Section,
    list_sections,
    list_torch_sections,
    slowest,
)


def section(name: str, script: str, cores: int = 1, **limits: float) -> Section:
    return Section("unit", name, [sys.executable, "-c", script], cores, **limits)


def test_each_is_printed_whole_and_one_failure_is_one_of_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meets = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "mine, other = folder / NAME, folder / OTHER\n"
        "print(NAME, 'begins', flush=True); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print(NAME, 'ends')\n"
    )
    pairs = [("a", "b", 1), ("b", "a", 0)]  # each waits until the other has begun
    sections = [
        section(name, meets.replace("NAME", repr(name)).replace("OTHER", repr(other)), cores)
        for name, other, cores in pairs
    ]
    runner = Runner(
        [*sections, section("c", "print('=== 3 passed ==='); raise SystemExit(3)")], tmp_path
    )
    runner.run()
    told = capfd.readouterr().out
    for name in "ab":
        assert f"########## {name}\n{name} begins\n{name} ends\n########## {name}: passed" in told
    assert runner.failed
    assert "c: FAILED (3): 3 passed after" in told
    summary = runner.summary()
    assert summary.index("########## c, the end:") < summary.index("########## Summary")


def test_tests_that_are_all_skipped_are_called_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = Runner([section("lab", "print('==== 4 skipped in 0.1s ====')")], tmp_path)
    runner.run()
    assert "lab: skipped: its tests say why" in capfd.readouterr().out
    assert not runner.failed


def test_what_goes_past_its_limit_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    runner = Runner(
        [section("a", f"{stubborn}while True: time.sleep(60)", limit_s=0.3, grace_s=0.3)], tmp_path
    )
    runner.run()
    assert runner.failed and "FAILED (ended at its limit)" in capfd.readouterr().out


def test_what_is_under_way_cleans_up_when_it_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    script = (
        "import pathlib, signal, time\n"
        "def end(*_): print('cleaned up', flush=True); raise SystemExit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)\n"
    )
    sleeper = section("c", "import time; time.sleep(60)", 64)
    sections = [section("a", script, 64), sleeper, section("b", "print('never')", 64)]
    runner = Runner(sections, tmp_path)
    thread = threading.Thread(target=_stop_once, args=(runner, begun))
    runner._start_what_fits()
    thread.start()
    thread.join()
    told = capfd.readouterr().out
    assert "cleaned up" in told and "never" not in told


def _stop_once(runner: Runner, begun: Path) -> None:
    until_s = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    runner.stop()


@pytest.mark.parametrize("everything", [False, True])
def test_every_part_has_a_section(everything: bool) -> None:
    sections = list_sections(everything=everything)
    assert {each.part for each in sections} == {*PARTS, *BY_NAME}


def test_every_version_of_torch_has_sections_in_its_own_environment() -> None:
    sections = list_torch_sections(["2.6.0", "2.11.0"])
    assert len({each.name for each in sections}) == 4
    for each in sections:
        version = each.name.removeprefix("torch ").partition(",")[0]
        assert any(f".venv-torch-{version}/bin/python" in part for part in each.command)


def test_the_slowest_tests_come_first(tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("0.500\ttests/a.py::test_a\n12.250\ttests/b.py::test_b[x y]\n")
    assert slowest(times).splitlines()[1:] == [
        "########## The slowest 2 of 2 tests",
        "    12.2 s   tests/b.py::test_b[x y]",
        "     0.5 s   tests/a.py::test_a",
    ]
