"""Plan file: the plan that a run follows, in its folder."""

from __future__ import annotations

from dearmpi.plan.data.plan import Plan
from dearmpi.train.loop.job import Job
from dearmpi.train.ranks.agreement import together
from dearmpi.train.run.run_folder import RunFolder


class PlanFile:
    """Has rank 0 write each plan that ``job`` comes to follow; that of an earlier run goes.

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
