"""Comparison: the methods in turn, round by round, each with a fresh model on the same work.

A method that fails on any rank is out on all of them, and the others go on. Only where one of this
package's own fails on some ranks while it trains must all of them end: the others wait in MPI for
those that failed, and no limit of their own lets them go on.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dearmpi.bench.link import measure_link
from dearmpi.bench.method import Entrant, Method, Setup, agree_on, problem_of
from dearmpi.bench.method_names import read_method
from dearmpi.bench.own_methods import ALONE
from dearmpi.bench.process_memory import peak_bytes, start_peak
from dearmpi.bench.result import Block, MeasuredIteration, Result, Row
from dearmpi.bench.torch_methods import PATIENCE_S, join_group, leave_group
from dearmpi.bench.workload_model import WorkloadModel
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, EngineConfig
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.self_planning import LEAST_STEPS
from dearmpi.errors import CommError, ConfigError, UsageError
from dearmpi.plan.data.layout import Bucket
from dearmpi.train.ranks.agreement import is_agreed

Tell = Callable[[str], None]
Keep = Callable[[Result], None]

_LINK_REPEATS = 3  # of communication alone in each round
_LINK_S = 30.0  # after which no further round measures it, as over a slow link


def compare_methods(
    world: World,
    workload: WorkloadModel,
    methods: Sequence[Method],
    *,
    length: Length,
    tell: Tell,
    keep: Keep = lambda result: None,
    comm_dtype: CommDtype = "fp32",
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Measure every method, and computation and communication alone (collective).

    tell: is given a line on each block as it ends. keep: what there is then. comm_dtype: in what
    communication alone sends fp32; methods know for themselves. missing: by label, why one is out
    from the start.
    """
    config = EngineConfig(comm_dtype=comm_dtype)
    buckets = buckets_of(world, workload.build())
    result = _blank(world, workload, methods, buckets, comm_dtype, missing)
    alone = read_method(ALONE)
    num_tuning = least_tuning(methods)
    entries = [(alone, result.alone), *zip(methods, result.rows, strict=True)]
    for number in range(length.num_rounds):
        warm_up_s = LINK_WARM_UP_S if number == 0 else 0
        if sum(times.total_s for times in result.link) < _LINK_S:
            result.link += measure_link(
                world, buckets, config, repeats=_LINK_REPEATS, warm_up_s=warm_up_s
            )
        turns = entries if number % 2 == 0 else entries[::-1]  # so that no drift favours one
        for method, row in turns:
            if not row.error:
                _run_block(world, _Trial(world, workload, method, length, num_tuning), row)
                tell(_describe(result, row, number))
                keep(result)
            if number == 0 and method is alone:  # the first of all, which itself sends nothing
                most = world.all_reduce([least_warming(result, length)], "max")[0]
                num_tuning = max(num_tuning, int(most))
    return result


def _blank(
    world: World,
    workload: WorkloadModel,
    methods: Sequence[Method],
    buckets: Sequence[Bucket],
    comm_dtype: CommDtype,
    missing: Mapping[str, str],
) -> Result:
    """What is known before anything is measured."""
    return Result(
        subject=workload.name,
        unit=workload.unit,
        batch_size=workload.batch_size,
        units_per_sample=workload.units_per_sample,
        world_size=world.size,
        hosts=len(set(world.hosts)),
        alone=Row(ALONE),
        rows=[
            Row(method.label, error=missing.get(method.label, ""), comm_dtype=method.comm_dtype)
            for method in methods
        ],
        link=[],
        num_buckets=len(buckets),
        payload_bytes=sum(bucket.nbytes for bucket in buckets),
        comm_dtype=comm_dtype,
        torch_threads=torch.get_num_threads(),
    )


def buckets_of(world: World, model: nn.Module) -> tuple[Bucket, ...]:
    """The buckets that the engine sends of ``model`` as it comes (collective)."""
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, config=EngineConfig()
    )
    buckets = tuple(bucket for bucket in optimizer.layout if bucket.trained)
    optimizer.close()
    return buckets


def _describe(result: Result, row: Row, number: int) -> str:
    if row.error:
        return f"{row.label}: {row.error}"
    rate = result.rate(row.blocks[-1].mean_s)
    return f"{row.label:<12} Iter #{number}: {rate:.1f} {result.unit}/sec per CPU"


def _run_block(world: World, trial: _Trial, row: Row) -> None:
    """Add a block to ``row``, or the reason why there is none."""
    start_bytes = start_peak()
    # The phases of a trial; after each, the ranks agree on whether to go on.
    for phase in (trial.join, trial.enter, trial.measure, trial.verify):
        row.error = agree_on(world, trial.attempt(phase))
        if row.error:
            break
    peak, note = peak_bytes(start_bytes), trial.note
    trial.leave()
    peaks = world.all_reduce([float(-1 if peak is None else peak)], "max")
    if not row.error:
        cpu_s = world.all_reduce([trial.cpu_s])[0] / world.size
        most = None if peaks[0] < 0 else int(peaks[0])
        row.blocks.append(Block(_average(world, trial.iterations), cpu_s, most, note))


class _Trial:
    """One method on one fresh model, on this rank."""

    def __init__(
        self,
        world: World,
        workload: WorkloadModel,
        method: Method,
        length: Length,
        least_tuning: int,
    ) -> None:
        self._world, self._workload, self._method = world, workload, method
        self._length, self._least_tuning = length, least_tuning
        self._model: nn.Module | None = None
        self._entrant: Entrant | None = None
        self._num_tuning = 0
        self.iterations: list[MeasuredIteration] = []
        self.cpu_s = 0.0

    def attempt(self, phase: Callable[[], None]) -> str:
        """Run a phase; what went wrong, in a line, or nothing."""
        try:
            phase()
        except CommError:
            raise  # our own communication is broken: nothing can go on
        except (Exception, SystemExit) as error:
            may_wait = self._method.waits_in_mpi and phase in (self.enter, self.measure)
            if may_wait and not _fails_on_all(error) and self._world.size > 1:
                raise
            problem = problem_of(error)
        else:
            return ""
        if self._method.uses_group:
            leave_group(self._entrant, failed=True)
        return problem

    def join(self) -> None:
        """Let the method find the other ranks by itself."""
        if self._method.uses_group:
            join_group(self._world, patience_s=self._length.patience_s)

    def enter(self) -> None:
        """Build the model and make it ready."""
        self._model = self._workload.build()
        setup = Setup(
            world=self._world,
            model=self._model,
            make_optimizer=self._workload.make_optimizer,
            options=self._method.options,
        )
        self._entrant = self._method.enter(setup)

    def measure(self) -> None:
        """Tune and warm up, then take the time of each iteration."""
        assert self._entrant is not None
        period = self._method.period
        if self._length.num_batches % period:
            raise ConfigError(
                f"a round has {self._length.num_batches} iterations, but the method's work repeats "
                f"every {period}; measure a multiple of {period}",
                code="out-of-range",
            )
        loss = self._workload.losses()
        while self._entrant.is_tuning() or self._num_tuning < self._least_tuning:
            _iterate(self._entrant, loss)
            self._num_tuning += 1
        for _ in range(self._length.num_warmup):
            _iterate(self._entrant, loss)
        gc.disable()
        cpu_s = time.process_time()
        try:
            for _ in range(self._length.num_batches):
                self.iterations.append(_iterate(self._entrant, loss))
            self.cpu_s = (time.process_time() - cpu_s) / self._length.num_batches
            if period > 1:
                self.iterations = _evened(self.iterations)
        finally:
            gc.enable()

    def verify(self) -> None:
        """Raise RuntimeError if the method did not train as it should."""
        assert self._entrant is not None and self._model is not None
        self._entrant.finish()
        if self._method.label == "alone":
            return
        length = self._length
        steps = self._num_tuning + length.num_warmup + length.num_batches
        problem = self._workload.problem(
            self._model,
            steps,
            comm_dtype=self._method.comm_dtype,
            compress=self._method.options.get("compress", "none"),
            density=self._method.density,
            progress=None if self._method.progress is None else self._method.progress(steps),
        )
        if problem:
            raise RuntimeError(f"trained wrongly: {problem}")

    @property
    def note(self) -> str:
        """What the method says of itself, while it is there."""
        try:
            return "" if self._entrant is None else self._entrant.describe()
        except Exception as error:  # a plug-in's, which has been measured all the same
            return f"cannot describe itself: {error}"

    def leave(self) -> None:
        entrant, self._entrant, self._model = self._entrant, None, None
        if entrant is not None:
            with contextlib.suppress(Exception):
                entrant.close()
        del entrant  # before the group that it uses
        leave_group(failed=False)


def _fails_on_all(error: BaseException) -> bool:
    """Whether every rank must have met the same: settings, their use, and what is missing."""
    return is_agreed(error) or isinstance(error, (ConfigError, UsageError, ImportError))


def _iterate(entrant: Entrant, loss: Callable[[nn.Module], Tensor]) -> MeasuredIteration:
    start = time.perf_counter()
    entrant.optimizer.zero_grad()
    value = loss(entrant.model)
    fed = time.perf_counter()
    entrant.backward(value)
    back = time.perf_counter()
    entrant.optimizer.step()
    return MeasuredIteration(fed - start, back - fed, time.perf_counter() - back)


def _evened(iterations: Sequence[MeasuredIteration]) -> list[MeasuredIteration]:
    """The mean of all in the place of each: a median would leave out what few of them do."""
    parts = zip(*((i.feed_forward_s, i.backprop_s, i.step_s) for i in iterations), strict=True)
    return [MeasuredIteration(*map(statistics.fmean, parts))] * len(iterations)


def _average(
    world: World, iterations: Sequence[MeasuredIteration]
) -> tuple[MeasuredIteration, ...]:
    """The mean over ranks of each iteration's parts (collective)."""
    parts = [part for i in iterations for part in (i.feed_forward_s, i.backprop_s, i.step_s)]
    means = [total / world.size for total in world.all_reduce(parts)]
    return tuple(MeasuredIteration(*means[i : i + 3]) for i in range(0, len(means), 3))


# New TCP connections carry up to a fifth less for a second or two. Those of MPI are as old as the
# job, those of gloo as the block, in which only a part of the time is communication.
LINK_WARM_UP_S = 2.0
BLOCK_WARM_UP_S = 4.0
_MOST_WARMING = 1000  # iterations; with ten times as many, sums in fp32 could no longer be judged


@dataclass(frozen=True, slots=True)
class Length:
    """How long to measure: ``num_rounds`` blocks of ``num_batches`` iterations for each method.

    num_warmup: iterations before each block that do not count, after those of ``least_tuning`` and
        ``least_warming``.
    warm_up_s: for how long connections between hosts are used before a block, at least.
    patience_s: how long a rank waits for others inside a peer before it gives the peer up.
    """

    num_warmup: int = 3
    num_batches: int = 5
    num_rounds: int = 3
    warm_up_s: float = BLOCK_WARM_UP_S
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.num_warmup < 1:
            raise ConfigError(
                f"{self.num_warmup} warm-up iterations; at least 1 is needed, since an iteration "
                "begins with the gathers of the one before",
                code="out-of-range",
            )
        if self.num_batches < 1 or self.num_rounds < 1:
            raise ConfigError(
                f"{self.num_rounds} rounds of {self.num_batches} iterations; both must be at "
                "least 1",
                code="out-of-range",
            )


def least_tuning(methods: Sequence[Method]) -> int:
    """Iterations before the warm-up that every method has at least.

    Those in which one tunes itself warm it up as well, so the others get as many as a plan takes.
    """
    return LEAST_STEPS if any(method.tunes_itself for method in methods) else 0


def least_warming(result: Result, length: Length) -> int:
    """Iterations before the warm-up that make every method's connections as fast as they get.

    By the least that an iteration takes, from what is known of computation and communication alone;
    a thousand at most. 0 where all ranks are on one host, whose processes know no such beginning.
    """
    bounds = result.bounds
    if bounds is None or result.hosts == 1:
        return 0
    num = min(_MOST_WARMING, math.ceil(length.warm_up_s / bounds.absolute_s))
    return max(0, num - length.num_warmup)
