"""Tracing: records some iterations of a run, and costs nothing in the others. Ranks compare
their clocks for it.

A script needs no change: ``DEAR_TRACE=60:70 mpirun -n 4 python script.py`` records iterations of
the first ``DistributedOptimizer`` that the script makes. ``dear-train report`` finds them in the
folder ``dear-trace``, or in that of ``DEAR_TRACE_FOLDER``.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.engine.optimizer import CONSTRUCTED, DistributedOptimizer
from dearmpi.engine.trace.layer_spans import LayerSpans
from dearmpi.errors import DearError
from dearmpi.report.read.trace import find_traces, merged_path, trace_path
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter
from dearmpi.span import Span
from dearmpi.train.ranks.agreement import together
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.settings.settings import SETTINGS

VARIABLE = "DEAR_TRACE"
FOLDER_VARIABLE = "DEAR_TRACE_FOLDER"
FOLDER = "dear-trace"

_NUM_ROUNDS = 20  # of a comparison of clocks
_traced: WeakKeyDictionary[DistributedOptimizer, Tracing] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to this rank's clock to get rank 0's.

    The true offset is within ``uncertainty_s`` of it, if the clocks run at one speed.
    """

    offset_s: float
    uncertainty_s: float


def measure_clock(
    world: World,
    *,
    origin_s: float = 0.0,
    now: Callable[[], float] = time.perf_counter,
) -> ClockOffset:
    """Compare this rank's clock with rank 0's (collective); both count from their ``origin_s``.

    No rank leaves an all-reduce before every rank has entered it. So each round bounds the offset
    from both sides: this rank left after rank 0 had entered, and rank 0 after this rank had. The
    bounds of all rounds hold together.
    """
    entered, left = np.empty(_NUM_ROUNDS), np.empty(_NUM_ROUNDS)
    for number in range(_NUM_ROUNDS):
        entered[number] = now() - origin_s
        world.barrier()
        left[number] = now() - origin_s
    reference = np.concatenate([entered, left])  # rank 0's, once it has been broadcast
    world.broadcast(HostBuffer(reference))
    least = float(np.max(reference[:_NUM_ROUNDS] - left))
    most = float(np.min(reference[_NUM_ROUNDS:] - entered))
    if world.is_root:
        return ClockOffset(0.0, 0.0)
    return ClockOffset((least + most) / 2, max(0.0, (most - least) / 2))


class Tracing:
    """Records the iterations ``window`` of ``model``: the first, and the one before which it stops.

    The all-gathers of the last one run during the one after it, and are recorded too.
    make_header: called when recording begins, since buckets may be laid out anew before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        window: tuple[int, int],
        writer: TraceWriter,
        make_header: Callable[[], TraceHeader],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._start, self._stop = window
        self._writer, self._make_header = writer, make_header
        self._layers: LayerSpans | None = None
        self._recording = False

    def begin_iteration(self, iteration: int) -> None:
        """Iteration number ``iteration``, from 1, comes next (collective at the first one)."""
        spans = self._optimizer.spans
        spans.iteration = iteration
        if self._start <= iteration < self._stop and not self._recording:
            self._begin()
        if not self._recording:
            return
        spans.recorder = self
        self._writer.flush()
        if iteration >= self._stop:
            self._detach()
        if iteration > self._stop:
            self.close()

    def add(self, span: Span) -> None:
        """Record ``span`` if it belongs to the iterations that are wanted."""
        if span.iteration < self._stop:
            self._writer.add(span)

    def close(self) -> None:
        """Stop recording. Safe to call twice."""
        self._detach()
        self._optimizer.spans.recorder = None
        self._recording = False
        self._writer.close()

    def _begin(self) -> None:
        origin_s = time.perf_counter()
        clock = measure_clock(self._optimizer.world, origin_s=origin_s)
        self._writer.begin(
            replace(
                self._make_header(),
                origin_s=origin_s,
                offset_s=clock.offset_s,
                uncertainty_s=clock.uncertainty_s,
            )
        )
        self._layers = LayerSpans(self._model, self._optimizer.spans)
        self._recording = True

    def _detach(self) -> None:
        if self._layers is not None:
            self._layers.remove()
            self._layers = None


def open_tracing(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    window: tuple[int, int] | None,
    folder: RunFolder,
) -> Tracing | None:
    """What records the iterations of ``window``, if there is one (collective).

    Traces of an earlier part of the run go, merged ones too. Raises AgreedError where a file cannot
    be made.
    """
    if window is None:
        return None
    world = optimizer.world
    run_id = world.broadcast_text(uuid.uuid4().hex[:12])
    with together(world, root_only=True), _explained(folder):
        if world.is_root:
            for path in find_traces(folder.path).values():
                path.unlink()
            merged_path(folder.path).unlink(missing_ok=True)

    def make_header() -> TraceHeader:
        return TraceHeader(
            run=folder.path.name,
            run_id=run_id,
            rank=world.rank,
            world_size=world.size,
            host=world.host,
            iterations=window,
            schedule=optimizer.schedule.name,
            bucket_bytes=tuple(bucket.nbytes for bucket in optimizer.layout),
        )

    with together(world), _explained(folder):
        writer = TraceWriter(trace_path(folder.path, world.rank))
    return Tracing(model, optimizer, window, writer, make_header)


@contextmanager
def _explained(folder: RunFolder) -> Iterator[None]:
    """Inside, a file that cannot be made or removed is told of in a sentence."""
    try:
        yield
    except OSError as error:
        raise DearError(
            f"cannot write traces in {folder.trace}: {error}; mend that, or leave out --trace",
            code="cannot-write",
        ) from error


def read_window(environment: Mapping[str, str]) -> tuple[int, int]:
    """The iterations that ``DEAR_TRACE`` asks for: the first, and the one before which to stop.

    Raises ConfigError for another form than START:STOP.
    """
    window: tuple[int, int] = SETTINGS["trace"].convert(environment[VARIABLE], label=VARIABLE)
    return window


def trace_next_optimizer() -> None:
    """Record the next ``DistributedOptimizer`` that is made, if none has been yet."""
    if not _traced and _begin_tracing not in CONSTRUCTED:
        CONSTRUCTED.append(_begin_tracing)


def stop_tracing(optimizer: DistributedOptimizer) -> None:
    """Record ``optimizer`` no more, since something else does."""
    if (tracing := _traced.pop(optimizer, None)) is not None:
        tracing.close()


def _begin_tracing(optimizer: DistributedOptimizer, model: nn.Module) -> None:
    """Record ``optimizer`` from its first step on (collective)."""
    CONSTRUCTED.remove(_begin_tracing)
    start, stop = read_window(os.environ)
    folder = RunFolder(Path(os.environ.get(FOLDER_VARIABLE, FOLDER)))
    tracing = open_tracing(model, optimizer, (start, stop), folder)
    assert tracing is not None
    _traced[optimizer] = tracing
    tracing.begin_iteration(1)
    num_steps = 0

    def after_step(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if optimizer not in _traced:
            return  # something else records it
        if num_steps <= stop:
            tracing.begin_iteration(num_steps + 1)
        if num_steps == stop:
            tell()

    def tell() -> None:
        if not optimizer.world.is_root or optimizer not in _traced:
            return
        last = min(num_steps, stop - 1)
        print(
            f"dearmpi: iterations {start} to {last} are recorded in {folder.trace}; "
            f"dear-train report {folder.path} draws one"
            if last >= start
            else f"dearmpi: warning: {VARIABLE} is {start}:{stop}, but the script took {num_steps} "
            "steps, so nothing is recorded; name earlier ones, counted from 1 in each job",
            file=sys.stderr,
        )

    def end() -> None:
        tracing.close()
        if num_steps < stop:
            tell()

    optimizer.register_step_post_hook(after_step)
    atexit.register(end)
