"""Local steps under mpirun: a script with ``dearmpi.Run`` that is resumed, and ``federate``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dearmpi
from tests.forks import forked
from tests.job import Ended, run_job

pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

ROOT = Path(dearmpi.__file__).parents[1]
LIMIT_S = 90.0
SCRIPT = """
import sys

import torch
from torch import nn

import dearmpi

folder, num_steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
world = dearmpi.connect()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
if kind == "scaffnew":
    optimizer = dearmpi.Scaffnew(model.parameters(), model, lr=0.05, p=0.3)
else:
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = dearmpi.LocalOptimizer(
        inner, model, sync_every=6, fragments=2, delay=2, compress="none",
        config=dearmpi.EngineConfig(bucket_cap_mb=1e-5),
    )
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
with dearmpi.Run(folder, model, optimizer) as run:
    print(f"rank {world.rank} begins at step {run.resume()}", flush=True)
    for indices in run.sampler(len(inputs), batch_size=12, num_steps=num_steps):
        rows = inputs[indices]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        run.log(loss)
optimizer.synchronize()
own = [param.detach().clone() for param in model.parameters()]
with optimizer.at_anchor():
    shared = [param.detach().clone() for param in model.parameters()]
torch.save([own, shared], f"{folder}/end-{world.rank}.pt")
optimizer.close()
"""


def launch(folder: Path, run: str, num_steps: int, *, kind: str, ranks: int) -> Ended:
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "script.py", run, str(num_steps), kind]
    ended = run_job(
        forked(command),
        ranks=ranks,
        limit_s=LIMIT_S,
        folder=folder,
        environment={"PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.output
    return ended


def end_of(run: Path, rank: int) -> list[list[Tensor]]:
    """The parameters of ``rank``, and those that it shares."""
    found: list[list[Tensor]] = torch.load(run / f"end-{rank}.pt", weights_only=True)
    return found


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", ["streaming", "scaffnew"])
def test_a_resumed_script_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Step 7 has an exchange of the streaming kind under way, and ranks that differ."""
    launch(tmp_path, "whole", 15, kind=kind, ranks=2)
    launch(tmp_path, "parts", 7, kind=kind, ranks=2)
    again = launch(tmp_path, "parts", 15, kind=kind, ranks=2)
    assert "rank 1 begins at step 7" in again.output and "shared values" not in again.output
    for rank in range(2):
        for expected, found in zip(
            end_of(tmp_path / "whole", rank), end_of(tmp_path / "parts", rank), strict=True
        ):
            assert are_equal(expected, found)


def test_other_numbers_of_ranks_go_on_from_what_was_shared(tmp_path: Path) -> None:
    launch(tmp_path, "two", 7, kind="streaming", ranks=2)
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    resumed = launch(tmp_path, "three", 7, kind="streaming", ranks=3)
    assert "go on from the shared values of step 7" in resumed.output
    _, shared = end_of(tmp_path / "two", 0)
    for rank in range(3):
        own, _ = end_of(tmp_path / "three", rank)
        assert are_equal(own, shared)
    launch(tmp_path, "three", 15, kind="streaming", ranks=3)
    ends = [end_of(tmp_path / "three", rank)[1] for rank in range(3)]
    assert are_equal(ends[0], ends[1]) and are_equal(ends[0], ends[2])
    assert not are_equal(ends[0], shared)


def test_federate_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn.datasets")
    found = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "dearmpi.cli.main", "federate", "--clients", "5"]
        command += ["--algorithms", "scaffnew,tamuna", "--cohort", "3", "--condition", "20"]
        ended = run_job(
            forked([*command, "--json", f"{ranks}.json"]),
            ranks=ranks,
            limit_s=LIMIT_S,
            folder=tmp_path,
            environment={"PYTHONPATH": str(ROOT)},
        )
        assert ended.returncode == 0, ended.output
        found.append(json.loads((tmp_path / f"{ranks}.json").read_text())["algorithms"])
    for alone, two in zip(*found, strict=True):
        assert alone["arrived"] and two["arrived"] and alone["cost"] == two["cost"]
        for one, other in zip(alone["rounds"], two["rounds"], strict=True):
            assert one.pop("squared_distance") == pytest.approx(
                other.pop("squared_distance"), rel=1e-6, abs=1e-12
            )
            assert one == other
