"""torch.distributed.checkpoint with a DistributedOptimizer: saved on 2 ranks, loaded on others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import forked
from tests.job import run_job

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch import nn

import dearmpi

folder, mode = sys.argv[1:]
world = dearmpi.connect()
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/store-{mode}-{world.size}",
    rank=world.rank,
    world_size=world.size,
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
inner = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = dearmpi.DistributedOptimizer(inner, model, bucket_cap_mb=1e-3)


def train(first, last):
    for step in range(first, last):
        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(step)).double()
        model(inputs.chunk(world.size)[world.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


if mode == "save":
    train(0, 3)
names = ("model", "optimizer")
state = dict(zip(names, get_state_dict(model, optimizer)))
if mode == "save":
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
else:
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
train(3, 6)
found = [param.detach().clone() for param in model.parameters()]
if mode == "save":
    if world.is_root:
        torch.save(found, f"{folder}/expected")
else:
    for ours, theirs in zip(found, torch.load(f"{folder}/expected"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_saved_on_two_ranks_goes_on_on_others(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for mode, count in (("save", 2), ("load", ranks)):
        ended = run_job(
            forked([sys.executable, script, tmp_path, mode]),
            ranks=count,
            limit_s=120,
            environment={"PYTHONPATH": str(ROOT)},
        )
        assert ended.returncode == 0, ended.output
