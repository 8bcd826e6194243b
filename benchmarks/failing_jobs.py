"""Does a job that fails end by its own error, and nothing else?

Usage: python -m benchmarks.failing_jobs [--jobs N] [--ranks N ...] [--kinds KIND ...]
                                         [--python PATH] [--cold] [--seconds S]

N jobs (200), of each number of ranks (2, 3, 4) and each kind in turn, fail in a step of a small
training. Each must end with the exit status of its error, and say that error last; lines of the
launcher and of MPI do not count. Prints a table, and exits with 1 if a job ended otherwise.

Kinds: one (the last rank raises), all (all ranks raise at once), backward (all, in a backward),
hook (one rank, in the hook of a parameter), update (all, in the optimizer's step), dear (all, an
error of dearmpi), interrupt (one rank, by a KeyboardInterrupt), status (one, by world.abort(7)),
thread (one, the same in a thread), threads (all, in threads), ending (one, in a thread, as the
program ends on all).

--python: that of an environment with another MPI, such as .venv-openmpi/bin/python.
--seconds: begin no further job after that long.
--cold: every rank is a process of its own from the start, which loads torch; else a fork of one.
    Forks leave out torch's handlers of C's exit(); one that aborts stands for them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.forks import forked
from tests.job import Ended, Job

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0

SCRIPT = """
import ctypes, sys, threading
import torch
import dearmpi

how = sys.argv[1]
world = dearmpi.connect()
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)
is_last = world.rank == world.size - 1


class FailingAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        if how == "update" and step == 5:
            raise ValueError("a wrong turn")
        return super().step(closure)


step = 0
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = FailingAdamW(model.parameters(), lr=0.1)
optimizer = dearmpi.DistributedOptimizer(optimizer, model, bucket_cap_mb=0.02)
batch = torch.ones(256, 64)
for step in range(1_000_000):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    if step == 5:
        if how == "all" or (how == "one" and is_last):
            raise ValueError("a wrong turn")
        if how == "backward":
            loss.register_hook(lambda _: 1 / 0)
        if how == "hook" and is_last:
            model[2].weight.register_hook(lambda _: 1 / 0)
        if how == "dear":
            world.broadcast(torch.ones(1), root=99)
        if how == "interrupt" and is_last:
            raise KeyboardInterrupt
        if how == "status" and is_last:
            world.abort(7)
        if how == "threads" or (how in ("thread", "ending") and is_last):
            threading.Thread(target=world.abort, args=(7,), daemon=True).start()
        if how == "ending":
            break
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a kind ends with; words: what the last line of a rank has, or nothing where it is ''."""

    code: int
    words: str


KINDS = {
    "one": Wanted(1, "ValueError: a wrong turn"),
    "all": Wanted(1, "ValueError: a wrong turn"),
    "backward": Wanted(1, "ZeroDivisionError: division by zero"),
    "hook": Wanted(1, "ZeroDivisionError: division by zero"),
    "update": Wanted(8, "ValueError: a wrong turn"),
    "dear": Wanted(2, "root is rank 99"),
    "interrupt": Wanted(130, "KeyboardInterrupt"),
    "status": Wanted(7, ""),
    "thread": Wanted(7, ""),
    "threads": Wanted(7, ""),
    "ending": Wanted(7, ""),
}
# Of a process that a signal ends, and of what threads run into whose libraries are gone.
FALSE = re.compile(
    r"Segmentation fault|Aborted|signal (6|11)\b|INTERNAL ASSERT|terminate called|could not parse|"
    r"unknown parameter type|Fatal Python error|core dumped"
)


@dataclass(slots=True)
class Tally:
    """What the jobs of one kind and number of ranks ended with."""

    right: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    last: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    @property
    def count(self) -> int:
        """How many jobs there were."""
        return sum(self.codes.values())


def last_words(output: str) -> str:
    """The last line that a rank has said itself, without its rank; or what is false in any."""
    false = FALSE.search(output)
    if false:
        return f"FALSE: {false.group()}"
    # prterun was seen to write a zero where it cuts what a rank has said in two.
    lines = [line.lstrip("\0") for line in output.splitlines()]
    said = [line for line in lines if line.startswith("[rank ") and "] " in line]
    return said[-1].partition("] ")[2] if said else ""


def is_right(ended: Ended, wanted: Wanted) -> bool:
    """Whether it ended with the status and the words of its error, and left nothing."""
    words = last_words(ended.output)
    said = wanted.words in words if wanted.words else words == ""
    return ended.returncode == wanted.code and said and ended.left_over == 0


def run(options: argparse.Namespace, script: Path, kind: str, ranks: int) -> tuple[Ended, float]:
    """How a job ended, and in how many seconds."""
    command = [options.python, script, kind]
    environment = {
        "PYTHONPATH": str(ROOT),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    with Job(
        command if options.cold else forked(command),
        ranks=ranks,
        limit_s=LIMIT_S,
        python=options.python,
        environment=environment,
    ) as job:
        ended = job.wait()
    return ended, ended.duration_s


def show(tallies: dict[tuple[str, int], Tally]) -> None:
    """Print the table."""
    print("| kind | ranks | jobs | right | exit statuses | last words | longest |")
    print("|---|---|---|---|---|---|---|")
    for (kind, ranks), tally in sorted(tallies.items()):
        codes = ", ".join(f"{code}: {n}" for code, n in tally.codes.most_common())
        last = "; ".join(f"{words[:60]}: {n}" for words, n in tally.last.most_common(3))
        print(
            f"| {kind} | {ranks} | {tally.count} | {tally.right} | {codes} | {last} "
            f"| {tally.longest_s:.1f} s |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; 0 if all ended as they should."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--python", type=lambda path: Path(path).absolute(), default=sys.executable)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    options.python = Path(options.python)
    tallies: dict[tuple[str, int], Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        until_s = time.monotonic() + options.seconds
        cells = [(kind, ranks) for ranks in options.ranks for kind in options.kinds]
        for index in range(options.jobs):
            if time.monotonic() > until_s:
                break
            kind, ranks = cells[index % len(cells)]
            ended, seconds = run(options, script, kind, ranks)
            tally = tallies[kind, ranks]
            tally.codes[ended.returncode] += 1
            tally.last[last_words(ended.output)] += 1
            tally.longest_s = max(tally.longest_s, seconds)
            if is_right(ended, KINDS[kind]):
                tally.right += 1
            else:
                print(f"--- job {index}, {kind} on {ranks}: {ended.returncode}\n{ended.output}")
            sys.stdout.flush()
    show(tallies)
    num_right = sum(tally.right for tally in tallies.values())
    num_jobs = sum(tally.count for tally in tallies.values())
    print(f"{num_right} of {num_jobs} jobs ended by their own error")
    return 0 if num_right == num_jobs else 1


if __name__ == "__main__":
    sys.exit(main())
