"""What must not leave a device, or wait for it: updates of tensors that the host cannot read.

The stand-in is torch's meta device. It computes nothing, so whoever asks for a value fails, as a
host that waits for a device would be slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.probe.probe import resident_scalars
from dearmpi.engine.update.master import MASTER, MasterRule, ResidentShard
from dearmpi.engine.update.shard_update import ShardUpdate
from dearmpi.engine.update.update import WholeUpdate, read_options
from dearmpi.plan.data.layout import build_layout, spec_of

Update = ShardUpdate | WholeUpdate


class Counting(torch.optim.SGD):
    """Counts its steps beside the parameters or on the host, as Adam with ``capturable`` or not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                place = param.device if group["capturable"] else "cpu"
                self.state[param].setdefault("step", torch.zeros((), device=place)).add_(1)


def update_of(
    kind: type[Update], *, masters: MasterRule, dtype: torch.dtype = torch.float32
) -> tuple[Update, Optimizer]:
    """Of a bucket of two parameters, each in a group of its own; only the first is capturable."""
    params = [nn.Parameter(torch.zeros(4, dtype=dtype, device="meta")) for _ in range(2)]
    specs = [spec_of(param, name) for param, name in zip(params, ("p", "q"), strict=True)]
    layout = build_layout([specs], 1)
    gradients, parameters = Arena(layout), Arena(layout)
    bucket = BucketRuntime(
        layout.buckets[0], params, rank=0, gradients=gradients, parameters=parameters
    )
    optimizer = Counting(
        [{"params": params[:1], "capturable": True}, {"params": params[1:], "capturable": False}],
        lr=0.1,
        momentum=0.9,
    )
    groups: dict[nn.Parameter, int] = {param: group for group, param in enumerate(params)}
    rules: Any = {"masters": masters, "scalars": resident_scalars(optimizer)}
    if kind is ShardUpdate:
        rules["shard"] = ResidentShard(bucket, rank=0)
    return kind(optimizer, bucket, groups, **rules), optimizer


def states_of(update: Update) -> list[dict[str, Any]]:
    if isinstance(update, ShardUpdate):
        return [update.state_of(run) for run in update.runs]
    return list(update.states().values())


def set_states(update: Update, state: dict[str, Tensor]) -> None:
    if isinstance(update, WholeUpdate):
        update.set_states({"p": dict(state), "q": dict(state)})
        return
    for run in update.runs:
        update.set_state(run, dict(state))


@pytest.mark.parametrize("masters", [MasterRule(), MasterRule(gathered_as=torch.bfloat16)])
@pytest.mark.parametrize("kind", [ShardUpdate, WholeUpdate])
def test_state_that_is_put_back_counts_its_steps_where_the_optimizer_does(
    kind: type[Update], masters: MasterRule
) -> None:
    """It comes from a checkpoint, or from other ranks, by way of the host."""
    update, _ = update_of(kind, masters=masters)
    moment = torch.zeros(4, device="meta")
    set_states(update, {"step": torch.tensor(3.0), "momentum_buffer": moment})
    assert [state["step"].device.type for state in states_of(update)] == ["meta", "cpu"]


RULES = {
    "fp32": (torch.float32, MasterRule()),
    "bf16 on the wire": (torch.float32, MasterRule(gathered_as=torch.bfloat16)),
    "bf16 with masters": (torch.bfloat16, MasterRule(weights=True)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kind", [ShardUpdate, WholeUpdate])
def test_an_update_asks_for_no_value_of_the_device(
    kind: type[Update], rule: tuple[torch.dtype, MasterRule]
) -> None:
    """It would hold up the thread that drives MPI until the device has come so far."""
    dtype, masters = rule
    update, optimizer = update_of(kind, masters=masters, dtype=dtype)
    for _ in range(3):
        update.step(read_options(optimizer), frozenset())
    for state in states_of(update):
        assert (MASTER in state) == (masters != MasterRule())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have Muon")
def test_an_optimizer_of_matrices_is_tried_with_one() -> None:
    """Muon takes nothing else."""
    matrix = nn.Parameter(torch.zeros(4, 4, device="meta"))
    assert resident_scalars(torch.optim.Muon([matrix])) == (frozenset(),)
