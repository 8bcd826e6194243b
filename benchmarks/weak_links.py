"""What does a run on several hosts do when a link is cut or slows down, or one rank's data is slow?

Usage: bin/netlab up 3 200mbit && python -m benchmarks.weak_links; bin/netlab down

Trains the small task of benchmarks/faults.py on three emulated hosts, once undisturbed and once for
each fault, which comes at step 30 and strikes host n1. Every run must reach its end, resumed where
it was ended, with the losses of the undisturbed one, bit for bit. Needs root; prints a table, and
what ``dear-train report`` says of each run.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import ROOT, TASK, read_losses
from dearmpi.report.page.report import write_report
from dearmpi.train.metrics import metrics

NUM_HOSTS = 3
NUM_STEPS = 120
FAULT_STEP = 30
RATE, TENTH = "200mbit", "20mbit"
STALL_S = 8.0
LIMIT_S = 120.0

SLOW_DATA = """
    import dearmpi
    if options.get("slow") and dearmpi.connect().rank == 1:
        data = Slow(data)
"""
SLOW_CLASS = """
class Slow(list):
    def __getitem__(self, index):
        time.sleep(0.02)  # 100 times what the others take
        return super().__getitem__(index)

def make(options)"""


@dataclass(frozen=True, slots=True)
class Fault:
    """strike, heal: commands of ``ip`` or ``tc``; heal comes ``lasts_s`` after, or at the end."""

    name: str
    strike: tuple[str, ...] = ()
    heal: tuple[str, ...] = ()
    lasts_s: float | None = None
    options: tuple[str, ...] = ()


def link(state: str) -> tuple[str, ...]:
    return ("ip", "-n", "dearlab-switch", "link", "set", "p1", state)


def rate(value: str) -> tuple[str, ...]:
    change = ("tc", "-n", "dearlab-switch", "class", "change", "dev", "p1", "parent", "1:")
    return (*change, "classid", "1:1", "htb", "rate", value, "burst", "64k", "cburst", "64k")


FAULTS = (
    Fault("none"),
    Fault("link cut for 3 s", link("down"), link("up"), 3.0),
    Fault("link cut for 20 s", link("down"), link("up"), 20.0),  # longer than the stall limit
    Fault("link at a tenth", rate(TENTH), rate(RATE)),
    Fault("data at a hundredth", options=("--task-option", "slow=1")),
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="dear-links-") as name:
        return strike_all(Path(name))


def strike_all(folder: Path) -> int:
    """One run for each fault; 1 if any ended otherwise than it should."""
    head, make, body = TASK.partition("def make(options)")
    marker = "    model ="
    text = head + SLOW_CLASS + body.replace(marker, SLOW_DATA + marker, 1)
    assert make
    (folder / "sines.py").write_text(text)
    expected: list[tuple[int, float | None]] = []
    num_wrong = 0
    print(f"{'fault':20} {'ends':>12} {'step before':>12} {'after':>8}  losses")
    for number, fault in enumerate(FAULTS):
        ends = [str(run_once(folder, f"run-{number}", fault))]
        if ends != ["0"]:
            ends.append(str(run_once(folder, f"run-{number}", Fault("none"))))
        rows = metrics.read(folder / "runs" / f"run-{number}")
        losses = read_losses(folder / "runs" / f"run-{number}")
        expected = expected or losses
        same = losses == expected and len(losses) == NUM_STEPS and ends[-1] == "0"
        num_wrong += not same
        times = [1e3 * (row.step_s or 0.0) for row in rows]
        before, after = (
            statistics.median(part) if part else float("nan")
            for part in (times[:FAULT_STEP], times[FAULT_STEP + 5 :])
        )
        print(
            f"{fault.name:20} {' then '.join(ends):>12} {before:9.0f} ms {after:5.0f} ms  "
            f"{'the same' if same else 'OTHERS'}",
            flush=True,
        )
        verdict = write_report(
            folder / "runs" / f"run-{number}", folder / f"report-{number}"
        ).verdict
        print(f"    {verdict.sentence if verdict else 'nothing was measured'}", flush=True)
    return 1 if num_wrong else 0


def run_once(folder: Path, name: str, fault: Fault) -> int:
    """Run to the end, struck at the fault's step; the exit code."""
    command = [
        *(str(ROOT / "bin" / "netlab"), "run", str(NUM_HOSTS), sys.executable),
        *("-m", "dearmpi.cli.main", "run", "--task", f"{folder}/sines.py:make", "--name", name),
        *("--run-folder", f"{folder}/runs", "--resume", "auto", "--max-steps", str(NUM_STEPS)),
        *("--batch-size", "12", "--log-interval", "1", "--checkpoint-interval", "5"),
        *("--bucket-cap-mb", "0.1", "--threads", "1"),
        *("--stall-warning-s", str(STALL_S / 2), "--stall-abort-s", str(STALL_S), *fault.options),
    ]
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, cwd=ROOT, start_new_session=True
        )
    try:
        if fault.strike:
            await_true(
                lambda: process.poll() is not None or f"step {FAULT_STEP}/" in output.read_text()
            )
            subprocess.run(fault.strike, check=True)
            if fault.lasts_s is not None:
                time.sleep(fault.lasts_s)
                subprocess.run(fault.heal, check=True)
        await_true(lambda: process.poll() is not None)
    finally:
        if process.poll() is None:
            print(f"{fault.name}: not over after {LIMIT_S} s", file=sys.stderr)
            os.killpg(process.pid, signal.SIGKILL)  # mpirun and the ranks too
            process.wait()
        if fault.heal:
            subprocess.run(fault.heal, check=True)
    if process.returncode not in (0, 8):
        print(output.read_text()[-3000:], file=sys.stderr)
    return process.returncode


def await_true(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
