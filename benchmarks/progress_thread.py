"""Where does the processor time of the progress thread go?

    bin/netlab run 4 python benchmarks/progress_thread.py [SETTING=VALUE...] [WORKLOAD] [COMPUTE_S]
        [COUNT] [MS...]

Trains a replayed model, whose computation sleeps. Times what the progress thread calls on its own
CPU clock, and prints medians of an iteration. ``SETTING``: of EngineConfig, as compress=int8.
``MS``: longest sleeps between polls, in milliseconds, to compare in turns.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from main_thread import Stopwatch  # type: ignore[import-not-found]

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.own_methods import read_config
from dearmpi.bench.process_memory import reuse_pages
from dearmpi.bench.replay import ReplayModel
from dearmpi.comm.algorithms.ring import RingReduceScatter
from dearmpi.comm.backends.mpi import MpiCollectives, MpiRequest
from dearmpi.comm.progress import progress, sleeping
from dearmpi.comm.progress.lane import Lane
from dearmpi.comm.progress.progress import Progress
from dearmpi.comm.watchdog.watchdog import Watchdog
from dearmpi.engine.iteration.stages import UpdateStage
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload

_WARMUP = 2
_DEFAULTS = ("resnet50", "1.32", "6")
_ENTRIES: tuple[tuple[Any, str, str], ...] = (
    (MpiRequest, "test", "MPI tests, with what they move"),
    (MpiCollectives, "start_send", "posts of sends"),
    (MpiCollectives, "start_receive", "posts of receives"),
    (RingReduceScatter, "_take", "sums"),
    (UpdateStage, "finish", "updates"),
    (Watchdog, "tend", "watchdog"),
    (Lane, "advance", "Python of lanes and rings"),
    (Progress, "_advance", "Python of polls"),
)


class ThreadClock:
    """The progress thread's CPU seconds so far, noted at each poll."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def around(self, advance: Any) -> Any:
        def noted(owner: Progress) -> Any:
            self.cpu_s = time.thread_time()
            return advance(owner)

        return noted


def main() -> None:
    """Train, and print a table for each longest sleep."""
    settings = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
    words = [word for word in sys.argv[1:] if "=" not in word]
    given = [*words[:3], *_DEFAULTS[len(words) :]]
    longest = [float(text) / 1e3 for text in words[3:]] or [sleeping._MOST_SLEEP_S]
    watch, clock = Stopwatch(), ThreadClock()
    for owner, method, title in _ENTRIES:
        watch.attach(owner, method, title)
    Progress._advance = clock.around(Progress._advance)  # type: ignore[method-assign]
    sleep = watch.around(time.sleep, "sleeps")
    progress.time = SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter)  # type: ignore
    reuse_pages()
    world = connect()
    torch.set_num_threads(1)
    name, compute_s, count = given[0], float(given[1]), int(given[2])
    profile = profile_workload(
        read_workload(name), feed_forward_s=compute_s / 3, backprop_s=compute_s * 2 / 3
    )
    model = ReplayModel(profile)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model, world=world, config=read_config(settings))

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()

    rows: dict[float, list[dict[str, float]]] = defaultdict(list)
    for number in range(_WARMUP + count):
        for longest_s in longest:
            sleeping._MOST_SLEEP_S = longest_s
            for is_measured in (False, True):
                before = clock.cpu_s, time.process_time(), time.perf_counter()
                watch.seconds.clear()
                watch.calls.clear()
                iterate()
                if is_measured and number >= _WARMUP:
                    rows[longest_s].append(
                        {
                            "progress thread": clock.cpu_s - before[0],
                            "process": time.process_time() - before[1],
                            "wall": time.perf_counter() - before[2],
                            **dict(watch.seconds),
                            **{f"n {title}": calls for title, calls in watch.calls.items()},
                        }
                    )
    optimizer.synchronize()
    assert threading.active_count() > 1, "progress is not on a thread of its own"
    if world.rank == 0:
        for longest_s in longest:
            report(longest_s, rows[longest_s])
    optimizer.close()


def report(longest_s: float, rows: list[dict[str, float]]) -> None:
    """Print the table."""
    mean = {
        key: statistics.median(row.get(key, 0.0) for row in rows) for row in rows for key in row
    }
    print(
        f"sleeps of at most {longest_s * 1e3:g} ms: iteration {mean['wall']:.3f} s; CPU "
        f"{mean['process']:.3f} s, of which progress thread {mean['progress thread']:.3f} s"
    )
    for *_, title in sorted(
        (*_ENTRIES, (0, 0, "sleeps")), key=lambda entry: -mean.get(entry[2], 0)
    ):
        calls = mean.get(f"n {title}", 0.0)
        print(f"  {title:32s} {mean.get(title, 0.0) * 1e3:8.1f} ms {calls:8.0f} calls")


if __name__ == "__main__":
    main()
