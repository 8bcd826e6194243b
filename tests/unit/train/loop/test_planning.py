"""Plan file: the plan that a run follows, in its own folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dearmpi.comm.world import World
from dearmpi.plan.data.plan import Plan
from dearmpi.train.disk import lock_folder
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.planning import PlanFile
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.run.run_folder import RunFolder
from tests.codes import raises

PLAN = cast(Plan, SimpleNamespace(to_json=lambda: "the plan"))


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_plan_is_written_into_no_folder_that_is_gone_or_another_jobs(
    alone: World, tmp_path: Path, taken_over: bool
) -> None:
    job = cast(Job, SimpleNamespace(world=alone, optimizer=SimpleNamespace(plan=PLAN)))
    path = RunFolder.create(tmp_path, "a").path
    with lock_folder(path / "in-use-by") as own:
        file = PlanFile(job, RunFolder(path, own))
        shutil.rmtree(path)
        if taken_over:
            RunFolder.create(tmp_path, "a").lock_file.write_text("process 7 on n1")
        told = "process 7 on n1" if taken_over else "in-use-by"
        with raises(AgreedError, "run-folder-lost", told) as caught:
            file.renew()
    assert caught.value.exit_code == 6
    assert not RunFolder(path).plan.exists()


def test_a_plan_is_written_once_and_that_of_an_earlier_run_goes(
    alone: World, tmp_path: Path
) -> None:
    optimizer = SimpleNamespace(plan=None)
    job = cast(Job, SimpleNamespace(world=alone, optimizer=optimizer))
    folder = RunFolder.create(tmp_path, "a")
    folder.plan.write_text("an earlier one")
    with lock_folder(folder.lock_file) as own:
        file = PlanFile(job, RunFolder(folder.path, own))
        assert file.renew() is None and not folder.plan.exists()
        optimizer.plan = PLAN
        assert file.renew() is PLAN and folder.plan.read_text() == "the plan"
        assert file.renew() is None
