"""Ranks that are in different calls of SyncBatchNorm, whose numbers must not be added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer, SyncBatchNorm, convert_sync_batchnorm
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import MismatchError
from tests.fakes.ranks import run_ranks


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.wide = nn.BatchNorm1d(6)


def inputs(channels: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(3.0 * channels).view(3, channels).to(dtype).requires_grad_()


def run_twice(model: Norms, odd: bool) -> None:
    """The odd rank runs its backward where the others run a second forward."""
    out = model.one(inputs())
    if odd:
        out.sum().backward()
    else:
        model.one(inputs())


FORWARD, BACKWARD = "the forward of layer", "the backward of layer"
CALLS: dict[str, tuple[Callable[[Norms, bool], object], str, str]] = {
    # What ranks do, whether they are the odd one or not, and what each is in.
    "order": (
        lambda m, odd: (m.two if odd else m.one)(inputs()),
        f"{FORWARD} two with 4 channels in torch.float32",
        f"{FORWARD} one with 4 channels in torch.float32",
    ),
    "channels": (
        lambda m, odd: m.wide(inputs(6)) if odd else m.one(inputs()),
        f"{FORWARD} wide with 6 channels in torch.float32",
        f"{FORWARD} one with 4 channels in torch.float32",
    ),
    "data type": (
        lambda m, odd: m.double().one(inputs(4, torch.float64)) if odd else m.one(inputs()),
        f"{FORWARD} one with 4 channels in torch.float64",
        f"{FORWARD} one with 4 channels in torch.float32",
    ),
    "number of calls": (
        run_twice,
        f"{BACKWARD} one with 4 channels in torch.float32",
        f"{FORWARD} one with 4 channels in torch.float32",
    ),
}


@pytest.mark.parametrize(
    ("size", "odd", "progress"), [(2, 0, "thread"), (3, 2, "thread"), (2, 1, "poll")]
)
@pytest.mark.parametrize("call", CALLS)
def test_ranks_in_different_calls_are_told_which(
    call: str, size: int, odd: int, progress: ProgressMode
) -> None:
    act, its, the_others = CALLS[call]

    def rank(world: World) -> str:
        model = convert_sync_batchnorm(Norms(), world)
        assert isinstance(model, Norms)
        with pytest.raises(MismatchError) as caught:
            act(model, world.rank == odd)
        world.barrier()
        model.float().two(inputs()).sum().backward()  # all ranks are where they were
        return str(caught.value)

    said = run_ranks(size, rank, progress=progress)
    assert said == said[:1] * size
    first, second = (its, the_others) if odd else (the_others, its)
    named = f"rank {odd or 1} on fakehost is in {first} where rank 0 on fakehost is in {second};"
    assert named in said[0]


def test_layers_are_known_by_their_names_in_the_optimizers_model() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4, world=world))
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, world=world)
        assert model[1].layer_name == "1"

    run_ranks(2, rank)
