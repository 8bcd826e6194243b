"""Planning while a run trains: the paper's search for a bucket size, the plan file, and which
iterations a plan leaves to be traced.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from dearmpi.comm.world import World
from dearmpi.config import MIB
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.self_planning import MOST_STEPS, NUM_PROFILED, NUM_WARMUP
from dearmpi.plan.data.plan import Plan
from dearmpi.train.loop.job import Job
from dearmpi.train.ranks.agreement import together
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.tune.search import BayesianSearch, SearchSpace, SharedSearch, Trial


class PlanFile:
    """Makes rank 0 write each plan that ``job`` follows, and remove the plan of an earlier run.

    Made on all ranks together. Raises AgreedError where a file cannot be written or removed, and
    where the folder is another job's by now.
    """

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder
        self._written: Plan | None = None
        with together(job.world, root_only=True):
            if job.world.is_root:
                folder.write_plan(None)

    def renew(self) -> Plan | None:
        """The plan that is followed from here on, if it is another than before (collective)."""
        plan = self._job.optimizer.plan
        if plan is None or plan is self._written:
            return None
        with together(self._job.world, root_only=True):
            if self._job.world.is_root:
                self._folder.check_own()
                self._folder.write_plan(plan.to_json())
        self._written = plan
        return plan


STEPS_PER_TRIAL = 5  # of which the first does not count: it pays for new buffers
NUM_TRIALS = 10


class CapSearch:
    """Makes ``optimizer`` try bucket caps for a few steps each, and keep the fastest.

    log: a CSV file for the trials. All ranks make it together.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, world: World, *, log: Path | None = None
    ) -> None:
        self._optimizer = optimizer
        model_bytes = sum(bucket.nbytes for bucket in optimizer.layout)
        search = BayesianSearch(_space(model_bytes), num_trials=NUM_TRIALS)
        self._search = SharedSearch(world, search, log=log)
        self._step_ends_s: list[float] = []
        self._cap_bytes = 0
        self._try(self._search.suggest())

    @property
    def best(self) -> Trial | None:
        """What the optimizer stays with; None as long as it searches."""
        return self._search.best if self._search.is_done else None

    def stepped(self) -> Trial | None:
        """Count a step; returns the trial that it completes, if any (then collective).

        Medians are compared, so a step between which the run was evaluated or saved counts little.
        """
        if self._search.is_done:
            return None
        self._step_ends_s.append(time.perf_counter())
        if len(self._step_ends_s) < STEPS_PER_TRIAL:
            return None
        ends_s = self._step_ends_s
        self._search.observe(
            self._cap_bytes, median(b - a for a, b in zip(ends_s, ends_s[1:], strict=False))
        )
        self._try(self._search.suggest())
        return self._search.trials[-1]

    def _try(self, cap_bytes: int) -> None:
        self._step_ends_s.clear()
        if cap_bytes != self._cap_bytes:
            self._cap_bytes = cap_bytes
            self._optimizer.fuse(cap_bytes / MIB)


def _space(model_bytes: int) -> SearchSpace:
    """The paper's caps; above the model's size they would all be the same."""
    paper = SearchSpace()
    highest = min(paper.highest_bytes, model_bytes)
    lowest, start = min(paper.lowest_bytes, highest), min(paper.start_bytes, highest)
    return SearchSpace(lowest, highest, start)


def why_untraceable(window: tuple[int, int], job: Job) -> str:
    """Empty, unless ``job`` takes none of the iterations in ``window``, or lays out its buckets
    anew in between.
    """
    first, last = job.start_step + 1, job.total_steps
    start, stop = window
    if start > last or stop <= first:
        return (
            f"trace is {start}:{stop}, but this run takes the iterations {first} to {last}; "
            "choose some of them"
        )
    if job.world.size == 1:
        return ""
    searched = job.start_step + NUM_TRIALS * STEPS_PER_TRIAL
    if job.settings.plan == "bayes" and start <= searched:
        return (
            f"trace is {start}:{stop}, but plan bayes tries buckets until iteration {searched}; "
            f"record from {searched + 1} on"
        )
    measured = job.start_step + NUM_WARMUP + NUM_PROFILED  # a plan may be taken up after this one
    planned, what = job.start_step + MOST_STEPS, "plan auto"
    if job.optimizer.is_choosing:
        what = "compress auto"
        planned = measured + MOST_STEPS * job.optimizer.is_planning
    is_open = job.optimizer.is_planning or job.optimizer.is_choosing
    if is_open and start <= planned and stop > measured + 1:
        return (
            f"trace is {start}:{stop}, but {what} lays out other buckets between iterations "
            f"{measured + 1} and {planned + 1}; record {planned + 1}:{planned + 1 + stop - start}, "
            f"or end at {measured + 1}"
        )
    return ""
