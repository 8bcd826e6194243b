"""What does recording a trace cost?

Usage: mpirun -n 2 python benchmarks/trace_overhead.py [WORKLOAD] [PAIRS]

Pairs of iterations: in one nobody listens, in the other all is recorded, and written as by
``dear-train run --trace``; which comes first alternates. A replayed workload computes for 0.1 s
forward and 0.2 s back. Prints rank 0's iteration time, the CPU time of its main thread and that of
all its threads, and of each the median difference within a pair with its 95 % confidence interval
(bootstrap).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.benchmark import BenchmarkSettings, make_workload_model
from dearmpi.bench.workload_model import WorkloadModel
from dearmpi.comm.world import World
from dearmpi.engine.trace.layer_spans import LayerSpans
from dearmpi.plan.data.workload import is_workload
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter

_COMPUTE_S = (0.1, 0.2)
_WARMUP = 10
_CLOCKS = {
    "iteration": time.perf_counter,
    "main thread": time.thread_time,
    "all threads": time.process_time,
}
_RESAMPLES = 4000


class Training:
    """Iterations of ``workload``, with and without an observer."""

    def __init__(self, world: World, workload: WorkloadModel) -> None:
        self._model, self._loss = workload.build(), workload.losses()
        self.optimizer = DistributedOptimizer(
            workload.make_optimizer(self._model.parameters()), self._model, world=world
        )

    @contextmanager
    def recording(self, writer: TraceWriter) -> Iterator[None]:
        """Inside, ``writer`` is told everything."""
        layers = LayerSpans(self._model, self.optimizer.spans)
        self.optimizer.spans.recorder = writer
        yield
        self.optimizer.spans.recorder = None
        layers.remove()

    def iterate(self, writer: TraceWriter | None) -> list[float]:
        """Seconds by each clock, from one step's last gather to the next one's."""
        start = [clock() for clock in _CLOCKS.values()]
        self.optimizer.zero_grad()
        self._loss(self._model).backward()
        self.optimizer.step()
        self.optimizer.synchronize()
        if writer is not None:
            writer.flush()
        return [clock() - begun for clock, begun in zip(_CLOCKS.values(), start, strict=True)]


def main() -> None:
    name, num_pairs = [*sys.argv[1:], *("bytes-lm", "200")[len(sys.argv) - 1 :]]
    world = connect()
    times = _COMPUTE_S if is_workload(name) else (None, None)
    question = BenchmarkSettings(name, (), feed_forward_s=times[0], backprop_s=times[1])
    workload = make_workload_model(world, question, lambda _: None)
    training = Training(world, workload)
    header = TraceHeader("r", "0", world.rank, world.size, world.host, (1, 2), "dear", ())
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace.json")
        writer.begin(header)
        for _ in range(_WARMUP):
            training.iterate(None)
        off, on = [], []
        for number in range(2 * int(num_pairs)):
            if number % 4 in (0, 3):
                off.append(training.iterate(None))
            else:
                with training.recording(writer):
                    on.append(training.iterate(writer))
        writer.close()
    if world.is_root:
        print(f"{workload.name} on {world.size} ranks, {num_pairs} pairs of iterations")
        report(np.array(off), np.array(on))
    training.optimizer.close()


def report(off: NDArray[np.float64], on: NDArray[np.float64]) -> None:
    """Print the table. off, on: seconds, (pairs, clocks)."""
    difference = on - off
    picked = np.random.default_rng(0).integers(len(off), size=(_RESAMPLES, len(off)))
    for column, title in enumerate(_CLOCKS):
        base = np.median(off[:, column])
        medians = np.median(difference[:, column][picked], axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        middle = np.median(difference[:, column])
        print(
            f"{title:12s} {base * 1e3:8.2f} ms, recording adds {middle * 1e3:+.3f} ms "
            f"({low * 1e3:+.3f} to {high * 1e3:+.3f}), {middle / base:+.2%} "
            f"({low / base:+.2%} to {high / base:+.2%})"
        )


if __name__ == "__main__":
    main()
