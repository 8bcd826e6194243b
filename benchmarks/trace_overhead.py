"""What does recording a trace cost?

Usage: mpirun -n 2 python benchmarks/trace_overhead.py [TASK] [ROUNDS]

Blocks of iterations take turns: nobody listens, or all is recorded and written as by ``dear-train
run --trace``. Prints the CPU time of rank 0's main thread per iteration, so that waiting for a core
or for the network does not count, and the difference between neighbouring blocks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.subject import task_subject
from dearmpi.engine.layer_spans import LayerSpans
from dearmpi.report.trace_writer import TraceHeader, TraceWriter
from dearmpi.train.seeding import seed_all
from dearmpi.train.tasks import build_task
from dearmpi.train.threads import choose_threads

_BLOCK = 5
_WARMUP = 10


def main() -> None:
    name, rounds = [*sys.argv[1:], *("bytes-lm", "20")[len(sys.argv) - 1 :]]
    world = connect()
    choose_threads(world, asked=None, progress_thread=world.size > 1)
    seed_all(0)
    task = build_task(name, {})
    batch_size = task.defaults.get("batch_size", 16)
    assert isinstance(batch_size, int)
    subject = task_subject(task, batch_size=batch_size, rank=world.rank, world_size=world.size)
    model, loss = subject.build(), subject.losses()
    optimizer = DistributedOptimizer(subject.make_optimizer(model.parameters()), model, world=world)
    spans = optimizer.spans

    def iterate(count: int, writer: TraceWriter | None) -> float:
        """CPU seconds of the main thread per iteration."""
        layers = LayerSpans(model, spans) if writer is not None else None
        spans.recorder = writer
        start = time.thread_time()
        for _ in range(count):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            if writer is not None:
                writer.flush()
        seconds = time.thread_time() - start
        optimizer.synchronize()
        spans.recorder = None
        if layers is not None:
            layers.remove()
        return seconds / count

    header = TraceHeader("r", "0", world.rank, world.size, world.host, (1, 2), "dear", ())
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace.json")
        writer.begin(header)
        iterate(_WARMUP, None)
        pairs = [(iterate(_BLOCK, None), iterate(_BLOCK, writer)) for _ in range(int(rounds))]
        writer.close()
    if world.rank == 0:
        off_ms = median(off for off, _ in pairs) * 1e3
        low, middle, high = quantiles([(on - off) * 1e3 for off, on in pairs], n=4)
        print(
            f"{task.name} on {world.size} ranks: main thread {off_ms:.2f} ms of CPU per iteration; "
            f"recording adds {middle:+.3f} ms ({low:+.3f} to {high:+.3f}, quartiles of "
            f"{len(pairs)} pairs), {middle / off_ms:+.2%}"
        )


if __name__ == "__main__":
    main()
