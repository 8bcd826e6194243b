"""How much of the main thread's time goes into this package's Python?

Usage: mpirun -n 2 python benchmarks/main_thread.py [TASK] [ITERATIONS]

Every entry from torch or from the training loop into the engine is timed on the main thread's own
CPU clock, so that waiting for the network, or for a core, does not count. Prints a table of the
means per iteration, and their share of it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.benchmark import BenchmarkSettings, make_workload_model
from dearmpi.engine.bucket import bucket
from dearmpi.engine.iteration import hooks
from dearmpi.engine.iteration.backprop import Backprop

_WARMUP = 5
_COPY, _CLEAR = "copies of a bucket's gradients", "zero_grad of the wrapped optimizer"
_ENTRIES: tuple[tuple[Any, str, str], ...] = (
    (bucket, "copy_each", _COPY),
    (Backprop, "end", "end of a backprop"),
    (hooks._PreForward, "__call__", "hook before a module's forward"),
    (hooks.ParameterTable, "__getitem__", "look-up of a parameter"),
    (hooks.ParameterTable, "get", "look-up of a parameter"),
    (hooks.ParameterTable, "items", "look-up of parameters"),
    (hooks.ParameterTable, "values", "look-up of parameters"),
    (DistributedOptimizer, "step", "step"),
    (DistributedOptimizer, "zero_grad", "zero_grad"),
)


class Stopwatch:
    """CPU time by entry, without what one entry spends in another or the clock takes itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._elsewhere = 0.0
        self._clock_s = clock_seconds()

    def attach(self, owner: Any, name: str, title: str) -> None:
        """Time ``owner.name`` from now on."""
        setattr(owner, name, self.around(getattr(owner, name), title))

    def around(self, function: Callable[..., Any], title: str) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._elsewhere = self._elsewhere, 0.0
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - start
                self.seconds[title] += took - self._elsewhere - self._clock_s
                self.calls[title] += 1
                self._elsewhere = before + took + self._clock_s

        return timed

    def attach_to_gradients(self) -> None:
        """Time what autograd calls around each gradient, which is made for each parameter."""
        make = hooks._translate_gradient

        def make_timed(*args: Any) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
            before, after = make(*args)
            return (
                self.around(before, "hook before a gradient accumulates"),
                self.around(after, "hook after it: launch"),
            )

        setattr(hooks, make.__name__, make_timed)


def clock_seconds() -> float:
    """What a look at the clock costs."""
    start = time.thread_time()
    for _ in range(1000):
        time.thread_time()
    return (time.thread_time() - start) / 1000


def main() -> None:
    name, count = [*sys.argv[1:], *("bytes-lm", "40")[len(sys.argv) - 1 :]]
    world = connect()
    workload = make_workload_model(world, BenchmarkSettings(name, ()), lambda _: None)
    model, watch = workload.build(), Stopwatch()
    for owner, method, title in _ENTRIES:
        watch.attach(owner, method, title)
    watch.attach_to_gradients()
    wrapped = workload.make_optimizer(model.parameters())
    wrapped.zero_grad = watch.around(wrapped.zero_grad, _CLEAR)  # type: ignore[method-assign]
    optimizer = DistributedOptimizer(wrapped, model, world=world)
    loss = workload.losses()
    for number in range(_WARMUP + int(count)):
        if number == _WARMUP:
            watch.seconds.clear()
            watch.calls.clear()
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
    optimizer.synchronize()
    if world.rank == 0:
        report(watch, cpu_s / int(count), wall_s / int(count), int(count), optimizer)


def report(
    watch: Stopwatch, cpu_s: float, wall_s: float, count: int, optimizer: DistributedOptimizer
) -> None:
    """Print the table."""
    tensors = sum(len(bucket.placements) for bucket in optimizer.layout)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s); {tensors} parameters in "
        f"{len(optimizer.layout)} buckets; iteration {wall_s * 1e3:.2f} ms, of which the main "
        f"thread had a core for {cpu_s * 1e3:.2f} ms"
    )
    print(f"{'entry':36s} {'calls':>6s} {'us each':>8s} {'ms':>7s} {'share':>6s}")
    for title, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        calls = watch.calls[title]
        print(
            f"{title:36s} {calls / count:6.0f} {seconds / calls * 1e6:8.1f} "
            f"{seconds / count * 1e3:7.3f} {seconds / count / wall_s:6.2%}"
        )
    total = sum(watch.seconds.values()) / count
    python = total - (watch.seconds[_COPY] + watch.seconds[_CLEAR]) / count
    for title, seconds in (("all", total), ("all but copies and that, which are torch's", python)):
        print(f"{title:52s} {seconds * 1e3:7.3f} {seconds / wall_s:6.2%}")


if __name__ == "__main__":
    main()
