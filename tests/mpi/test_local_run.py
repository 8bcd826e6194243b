"""Local steps under mpirun: a script and `dear-train run`, resumed, and `dear-train federate`."""

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
from dearmpi.train import checkpoint
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


TASK = """
import torch
from torch import nn

from dearmpi.train.tasks.task import Task


class Data:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum().reshape(1).sin()


def make(options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 1))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    return Task("sine", model, Data(), loss, eval_data=Data(), defaults={"batch_size": 24})
"""
FLAGS = (
    "--sync-every 6 --sync-after 2 --outer-lr 0.7 --outer-momentum 0.5 --sync-fragments 2 "
    "--sync-delay 2 --sync-mix 0.5 --compress int8 --bucket-cap-mb 0.001 "
    "--gradient-accumulation-steps 2 --max-grad-norm 0.5 --checkpoint-interval 4 --eval-interval 4"
)


def run_command(folder: Path, *arguments: str, ranks: int, code: int = 0) -> str:
    """The output of `dear-train run` with all that local steps have."""
    (folder / "sine.py").write_text(TASK)
    command = [sys.executable, "-m", "dearmpi.cli.main", "run", "--task", "sine.py:make"]
    ended = run_job(
        forked([*command, *FLAGS.split(), *arguments]),
        ranks=ranks,
        limit_s=LIMIT_S,
        folder=folder,
        environment={"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == code, ended.output
    return ended.output


def test_the_command_takes_every_flag_and_resumes(tmp_path: Path) -> None:
    run_command(tmp_path, "--max-steps", "15", "--name", "whole", ranks=2)
    run_command(tmp_path, "--max-steps", "9", "--name", "parts", ranks=2)
    resume = ("--name", "parts", "--resume", "auto")
    output = run_command(tmp_path, "--max-steps", "15", *resume, ranks=2)
    assert "resumed at step 9" in output and "shared values" not in output
    whole, parts = (
        checkpoint.load(checkpoint.resolve(tmp_path / "runs" / name)) for name in ("whole", "parts")
    )
    assert whole.step == parts.step == 15
    for saved, found in ((whole.model, parts.model), (whole.optimizer, parts.optimizer)):
        for name, value in saved.items():
            assert str(value) == str(found[name]), name
    assert all(torch.equal(parts.model[name], value) for name, value in whole.model.items())
    output = run_command(tmp_path, "--max-steps", "18", *resume, ranks=3)
    assert "all ranks go on from the shared values of step 15" in output
    assert checkpoint.load(checkpoint.resolve(tmp_path / "runs" / "parts")).step == 18


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
