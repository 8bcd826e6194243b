"""dear-train run --plan on all ranks: followed, told of and kept, and no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dearmpi.cli import run_session as command
from dearmpi.cli.endings import rank_log
from dearmpi.cli.run_session import run_session
from dearmpi.comm.world import World
from dearmpi.engine.setup.self_planning import MOST_STEPS
from dearmpi.plan.data.plan import Plan, read_plan
from dearmpi.train.loop import job
from dearmpi.train.loop.job import LEAST_STEPS_TO_PLAN
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.stop import StopRequest
from dearmpi.train.settings.sources import make_source
from tests.codes import raises
from tests.mpi.task_file import task_file

pytestmark = pytest.mark.ranks(2)
NUM_STEPS = MOST_STEPS + 4  # in which a plan is taken up, and followed

TASK = """
import torch
from torch import nn
from dearmpi.train.tasks.task import Task


def make(options):
    inputs = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3)
    data = [(row, row.sum().sin().reshape(1)) for row in inputs]
    width = int(options.get("width", "16"))
    layers = [nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)]
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    defaults = {"optimizer": "AdamW", "lr": 0.01, "batch_size": 8, "precision": "fp64"}
    model = nn.Sequential(*layers)
    model.nothing = nn.Parameter(torch.empty(0))  # which no plan lists
    return Task("curve", model, data, loss, defaults=defaults)
"""


@pytest.fixture
def folder(world: World, shared_tmp_path: Path) -> Iterator[Path]:
    """A folder with the task in it, the same on all ranks."""
    with task_file(world, shared_tmp_path / "curve.py", TASK) as folder:
        yield folder


@pytest.fixture
def _short_runs_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs plan that would not, since they follow the plan for a few steps alone."""
    for module in (job, command):
        monkeypatch.setattr(module, "LEAST_STEPS_TO_PLAN", NUM_STEPS)


def run(world: World, folder: Path, name: str, **given: object) -> Path:
    values = {"task": f"{folder}/curve.py:make", "run_folder": str(folder), "name": name, **given}
    with rank_log(speaks=False) as log, StopRequest() as stop:
        layer = make_source("flag", {"log_interval": 1, **values})
        assert run_session(world, [layer], stop=stop, log=log, command=["dear-train"]) == 0
    world.barrier()
    return folder / name


def losses(run_folder: Path) -> list[float | None]:
    return [row.loss for row in metrics.read(run_folder)]


def written_plan(world: World, run_folder: Path) -> Plan:
    """The plan of the run, after all ranks have seen it."""
    plan = read_plan(run_folder / "plan.json")
    world.barrier()
    return plan


@pytest.mark.usefixtures("_short_runs_plan")
def test_a_plan_changes_no_number_and_a_resumed_run_goes_on_by_it(
    world: World, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = losses(run(world, folder, "plain", max_steps=NUM_STEPS + 4))
    capfd.readouterr()
    run(world, folder, "a", plan="auto", max_steps=NUM_STEPS)
    told = capfd.readouterr().out
    plan = written_plan(world, folder / "a")
    assert plan.world_size == world.size
    assert (plan.describe() in told) == ("from the times of the first 5" in told) == world.is_root
    assert ("plan taken up in " in told) == world.is_root
    assert "predicted iteration" in (folder / f"a/logs/rank-{world.rank:05d}.log").read_text()

    run(world, folder, "a", resume="auto", max_steps=NUM_STEPS + 2)
    told = capfd.readouterr().out
    assert written_plan(world, folder / "a") == plan
    assert ("auto, the one that this run has made before" in told) == world.is_root

    path = folder / "plan.json"
    older = replace(plan, version="0.0.9")
    if world.is_root:  # the others need no file
        path.write_text(older.to_json())
    with raises(AgreedError, "plan-contradicts-settings", "max_grad_norm 1"):
        run(world, folder, "clipped", plan=str(path), max_grad_norm=1)
    capfd.readouterr()
    run(world, folder, "a", resume="auto", plan=str(path), max_steps=NUM_STEPS + 4)
    assert ("the plan was made by dearmpi 0.0.9, and this" in capfd.readouterr().out) == (
        world.is_root
    )
    assert written_plan(world, folder / "a") == older
    assert losses(folder / "a") == pytest.approx(expected, rel=1e-9)


def test_a_plan_that_cannot_be_followed_is_refused_by_all_before_anything_is_written(
    world: World, folder: Path
) -> None:
    for given, problem in (
        ({"plan": "auto", "window": 3}, "window is 3, but the plan decides on it"),
        ({"plan": "bayes", "bucket_cap_mb": 3}, "bucket_cap_mb is 3.0, but plan bayes searches"),
        ({"plan": "bayes", "trace": "50:70", "max_steps": 80}, "record from 51 on"),
        ({"plan": f"{folder}/none.json"}, "cannot read the plan .*none.json"),
        (
            {"plan": "auto", "trace": "4:7", "max_steps": 200},
            "between iterations 6 and 51; record 51:54, or end at 6",
        ),
    ):
        with pytest.raises(AgreedError, match=problem):
            run(world, folder, "a", **given)
    assert not (folder / "a").exists()


def test_a_short_run_pays_for_no_plan(
    world: World, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(world, folder, "a", plan="auto", max_steps=LEAST_STEPS_TO_PLAN - 1)
    told = capfd.readouterr().out
    assert ("auto pays from 100 steps on, and 99 are left" in told) == world.is_root
    assert not (folder / "a" / "plan.json").exists()


@pytest.mark.usefixtures("_short_runs_plan")
def test_over_several_hosts_a_run_plans_unasked(
    world: World,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_host = world.hosts
    monkeypatch.setattr(world, "hosts", tuple(f"n{rank}" for rank in range(world.size)))
    run(world, folder, "a", max_steps=NUM_STEPS)
    told = capfd.readouterr().out
    assert ("plan: auto, the default over several hosts; made from" in told) == world.is_root
    plan = written_plan(world, folder / "a")

    monkeypatch.setattr(world, "hosts", one_host)  # the next part of the run goes on as this one
    traced = f"{NUM_STEPS + 3}:{NUM_STEPS + 5}"
    for num_more, given in ((2, {}), (4, {"trace": traced})):
        num_steps = NUM_STEPS + num_more
        run(world, folder, "a", resume="auto", max_steps=num_steps, **given)
        told = capfd.readouterr().out
        assert ("auto, the one that this run has made before" in told) == world.is_root
        assert written_plan(world, folder / "a") == plan


@pytest.mark.usefixtures("_short_runs_plan")
@pytest.mark.parametrize("given", [{"plan": "none"}, {"window": 3}, {"trace": "4:7"}])
def test_a_run_that_asks_for_fixed_buckets_keeps_them_on_any_hosts(
    world: World,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, object],
) -> None:
    monkeypatch.setattr(world, "hosts", tuple(f"n{rank}" for rank in range(world.size)))
    run(world, folder, "a", max_steps=NUM_STEPS, **given)
    assert "plan" not in capfd.readouterr().out
    assert not (folder / "a" / "plan.json").exists()


def test_trying_bucket_caps_changes_no_number_and_ends_with_the_best(
    world: World, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"max_steps": 53, "task_options": ["width=512"]}
    expected = losses(run(world, folder, "plain", **given))
    capfd.readouterr()
    found = run(world, folder, "a", plan="bayes", **given)
    told = capfd.readouterr().out
    assert losses(found) == pytest.approx(expected, rel=1e-9)
    assert ("bucket cap from here on" in told) == world.is_root
    rows = (found / "bucket_caps.csv").read_text().splitlines()[1:]
    assert len(rows) == 10
    (best,) = [row.split(",") for row in rows if row.endswith("*")]
    assert float(best[2]) == min(float(row.split(",")[2]) for row in rows)
    if world.is_root:
        assert f"bucket cap from here on: {float(best[1]):.3g} MiB" in told
        assert len({row.split(",")[1] for row in rows}) > 1
