"""What does a ring take once its last rank has come, and what do those who waited spend on it?

Usage: mpirun -n 8 python benchmarks/late_rank.py [ROUNDS [SHARE]]

Rank 0 comes late to a reduce-scatter of a small bucket. Prints medians over rounds: the time from
then to its end on the rank where it ends last, and of each other rank's progress thread the CPU
time and how often it slept; with the engine's sleeps between polls, and with sleeps of another
share of the wait, taking turns. All ranks must be on one machine, whose clock they compare.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import defaultdict

import numpy as np

from dearmpi.comm.lifecycle import connect
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.progress import sleeping as backoff
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World

_LATE_S = (0.0, 0.005, 0.02, 0.1)
_SHARD_NUMEL = 8192
_SHARE = backoff._SLEEP_SHARE


def main() -> None:
    num_rounds = int([*sys.argv[1:], "20"][0])
    other_share = float([*sys.argv[2:], "0.02"][0])
    world = connect()
    channel = world.open_channel("trial", window=1)
    rows: dict[tuple[float, float], list[list[float]]] = defaultdict(list)
    for _ in range(num_rounds):
        for late_s in _LATE_S:
            for share in (_SHARE, other_share):
                backoff._SLEEP_SHARE = share
                rows[late_s, share].append(one_round(world, channel, late_s))
    if world.is_root:
        print("late by  share  to the end  CPU time  sleeps")
        for (late_s, share), row in rows.items():
            took_s, cpu_s, num_sleeps = (statistics.median(part) for part in zip(*row, strict=True))
            print(
                f"{late_s * 1e3:4.0f} ms  {share:5.3f}  {took_s * 1e3:7.2f} ms  "
                f"{cpu_s * 1e3:5.2f} ms  {num_sleeps:6.0f}"
            )
    channel.close()


def one_round(world: World, channel: Channel, late_s: float) -> list[float]:
    """Seconds from the last rank's coming to its end; the others' mean CPU time and sleeps."""
    buffer = HostBuffer(np.zeros(world.size * _SHARD_NUMEL, dtype=np.float32))
    world.barrier()
    before = spent(world)
    if world.is_root:
        time.sleep(late_s)
    begin_s = time.perf_counter()
    channel.run("RS", lambda collectives: collectives.start_reduce_scatter(buffer, "ring"))
    end_s = time.perf_counter()
    took_s = world.all_reduce([end_s], "max")[0] - begin_s  # on Linux one clock for all processes
    after = spent(world)
    own = [0.0, 0.0] if world.is_root else [b - a for a, b in zip(before, after, strict=True)]
    total = world.all_reduce([took_s if world.is_root else 0.0, *own])
    return [total[0], *(value / max(1, world.size - 1) for value in total[1:])]


def spent(world: World) -> list[float]:
    """CPU seconds and sleeps of the progress thread since its start."""
    found: list[float] = []

    def look() -> None:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        found.extend([usage.ru_utime + usage.ru_stime, usage.ru_nvcsw])

    world.on_progress_thread(look)
    return found


if __name__ == "__main__":
    main()
