"""``python -m dearmpi SCRIPT``: the script is DDP's own, and knows nothing of dearmpi."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.forks import forked
from tests.job import run_job

pytestmark = pytest.mark.ranks(1)

SCRIPT = """
import argparse, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", type=float)
parser.add_argument("--out")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
module = nn.SyncBatchNorm.convert_sync_batchnorm(module, None)
model = DDP(module)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=options.schedule)
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(4 * size, 4, generator=generator, dtype=torch.float64)[rank::size]
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
optimizer.consolidate_state_dict()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
if rank == 0:
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, options.out)
print(json.dumps({
    "rank": rank, "size": size, "total": total.item(), "main": __name__, "file": __file__,
    "kind": type(model).__module__, "optimizer": type(optimizer).__name__,
    "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
    "host": [os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]],
    "launched": dist.is_torchelastic_launched(),
    "layers": sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()),
}) + "\\n", end="", flush=True)  # one piece, which the other rank's cannot part
dist.destroy_process_group()
"""


def expected_model(size: int) -> dict[str, torch.Tensor]:
    """What one process trains on the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        inputs = torch.randn(4 * size, 4, generator=generator, dtype=torch.float64)
        model(inputs).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("options", [[], ["--schedule", "wfbp"], ["--gather", "parameters"]])
def test_a_script_runs_unchanged(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT
        if "parameters" not in options
        else SCRIPT.replace('"optimizer": optimizer.state_dict()', '"optimizer": None')
    )
    own = ["--schedule", "0.25", "--out", str(tmp_path / "out.pt")]
    command = [sys.executable, "-m", "dearmpi", *options, str(script), *own]
    ended = run_job(forked(command), ranks=2, limit_s=120)
    assert ended.returncode == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 1]
    for line in lines:
        assert line["total"] == 1.0 and line["size"] == 2 and line["layers"] == 1
        assert line["main"] == "__main__" and line["file"] == str(script)
        assert line["kind"] == "dearmpi.drop_in.wrapper" and line["optimizer"] == "SGD"
        assert line["local"] == [str(line["rank"]), "2"]
        assert line["host"] == ["0", "1"] and line["launched"]
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in expected_model(2).items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-10, atol=1e-12)


def test_a_module_and_an_exit_status(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(
        "import sys, torch.nn.parallel as parallel\n"
        "assert parallel.DistributedDataParallel.__module__ == 'dearmpi.drop_in.wrapper'\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    command = [sys.executable, "-m", "dearmpi", "-m", "trains", "3"]
    ended = run_job(forked(command), ranks=2, limit_s=90.0, folder=tmp_path)
    assert ended.returncode == 3, ended.output


def test_settings_that_contradict_are_refused_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text("print('trained')\n")
    command = [sys.executable, "-m", "dearmpi", "--compress", "topk", str(tmp_path / "trains.py")]
    ended = run_job(forked(command), ranks=1, limit_s=90.0)
    assert ended.returncode == 2
    assert "take gather 'parameters'" in ended.output and "trained" not in ended.output


def test_ranks_that_cannot_find_each_other_end_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text("print('trained')\n")
    command = [sys.executable, "-m", "dearmpi", str(tmp_path / "trains.py")]
    other = {"OMPI_COMM_WORLD_SIZE": "2"}
    ended = run_job(forked(command), ranks=1, limit_s=90.0, environment=other)
    assert ended.returncode == 3, ended.output
    assert "dearmpi: error: " in ended.output and "[launcher-mismatch]" in ended.output
    assert "Traceback" not in ended.output and "trained" not in ended.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["absent.py"], "'absent.py'"),
        ([], "name a script"),
        (["--gather", "all", "train.py"], "'all'"),
    ],
)
def test_a_wrong_command_line_is_reported_once(given: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dearmpi", *given]
    ended = run_job(forked(command), ranks=2, limit_s=90.0, folder=tmp_path)
    assert ended.returncode == 2
    assert said in ended.output and ended.output.count("error: ") == 1, ended.output


ALONE = """
import torch
model = torch.nn.Linear(2, 1)
WRAP
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
SERVE = """
import dearmpi
kept = dearmpi.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
model = torch.nn.Linear(2, 1)  # of the ranks' own
"""
WRAP = "model = torch.nn.parallel.DistributedDataParallel(model)"


@pytest.mark.parametrize(("wrap", "num_warnings"), [("", 1), (WRAP, 0), (SERVE, 0)])
def test_ranks_that_train_models_of_their_own_are_told(
    wrap: str, num_warnings: int, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text(ALONE.replace("WRAP", wrap))
    command = [sys.executable, "-m", "dearmpi", str(tmp_path / "alone.py")]
    ended = run_job(forked(command), ranks=2, limit_s=90.0)
    assert ended.returncode == 0
    assert ended.output.count("each of the 2 ranks trains a model of its own") == num_warnings


SERVES_ITSELF = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dearmpi.config import EngineConfig
from dearmpi.drop_in.serving import Chosen
from dearmpi.integrations import serve

world = serve(comm_dtype="bf16")
if world.is_root:
    serve(schedule="wfbp")  # nobody else: only the first call is collective
    chosen = EngineConfig(schedule="wfbp", gather="gradients", comm_dtype="bf16")
    assert Chosen.choices == chosen, Chosen.choices
assert DistributedDataParallel.__module__ == "dearmpi.drop_in.wrapper"
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (world.rank, 2)
dist.destroy_process_group()
"""


def test_a_script_serves_itself_and_keeps_what_it_has_chosen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SERVES_ITSELF)
    ended = run_job(forked([sys.executable, str(script)]), ranks=2, limit_s=120)
    assert ended.returncode == 0, ended.output


SPAWNS = """
import os, socket, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def train(rank, size, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    model = DDP(nn.Linear(2, 1, bias=False).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), rank, dtype=torch.float64)).sum().backward()
        optimizer.step()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    line = f"trained {rank} {total.item():g} {os.environ['MASTER_PORT'] == address[-5:]}"
    print(line + "\\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    size, port = int(sys.argv[1]), free_port()
    os.environ["MASTER_PORT"] = str(port)
    mp.spawn(train, args=(size, f"tcp://127.0.0.1:{port:05}"), nprocs=size, join=True)
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_stand_for_the_processes_that_a_script_spawns(size: int, tmp_path: Path) -> None:
    """They take the address that one process would have chosen, with a free port."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    command = [sys.executable, "-m", "dearmpi", str(script), str(size)]
    ended = run_job(forked(command), ranks=2, limit_s=90.0)
    if size == 2:
        assert ended.returncode == 0, ended.output
        lines = sorted(line for line in ended.output.splitlines() if line.startswith("trained"))
        assert lines == ["trained 0 3 True", "trained 1 3 True"], ended.output
    else:
        assert ended.returncode != 0 and "trained" not in ended.output
        assert "spawns 3 processes" in ended.output and "mpirun -n 3" in ended.output


GROUP_OF_ONE = """
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
"""


def test_a_group_of_other_ranks_than_the_jobs_is_refused(tmp_path: Path) -> None:
    """What the script reduces by itself would not be over the ranks that train together."""
    (tmp_path / "train.py").write_text(GROUP_OF_ONE)
    command = [sys.executable, "-m", "dearmpi", str(tmp_path / "train.py")]
    ended = run_job(forked(command), ranks=2, limit_s=90.0)
    assert ended.returncode != 0
    assert "torch.distributed has 1 ranks" in ended.output, ended.output
