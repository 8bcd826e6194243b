"""A signal handler that reads the model finds one step's parameters, wherever it comes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.fakes.ranks import run_ranks

PACKAGE = Path(dearmpi.__file__).parent
INTERRUPTED = (str(PACKAGE / "engine"), str(PACKAGE / "comm"))
NUM_STEPS = 3
_SEEDING = threading.Lock()  # ranks are threads, which share torch's generator


@contextmanager
def interrupted_everywhere(handler: Callable[[], None]) -> Iterator[None]:
    """Call ``handler`` before every line that the calling thread runs in the engine and below it.

    Python calls a signal handler between any two of them.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(INTERRUPTED):
            return None
        if event == "line":
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Net(nn.Module):
    """Its second layer takes no part in every other step, which ranks must tell each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, inputs: Tensor, number: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1 or number % 2 == 0:
                inputs = layer(inputs).tanh()
        return inputs.square().mean()


def make_net() -> Net:
    with _SEEDING:
        torch.manual_seed(3)
        return Net().double()


def inputs_of(step: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def values(net: nn.Module) -> Tensor:
    return torch.cat([value.flatten() for value in net.state_dict().values()]).clone()


def values_by_step() -> list[Tensor]:
    """With plain torch, before the first step and after each."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    found = [values(net)]
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        net(inputs_of(step), step).backward()
        optimizer.step()
        found.append(values(net))
    return found


def train(world: World, interrupted: Callable[[nn.Module], Any], **settings: Any) -> Tensor:
    """Both ranks on the same samples, so that their mean is that of one process."""
    net = make_net()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), lr=0.1),
        net,
        world=world,
        bucket_cap_mb=1e-6,
        **settings,
    )
    for step in range(NUM_STEPS):
        with interrupted(net):
            optimizer.zero_grad()
            net(inputs_of(step), step).backward()
            optimizer.step()
    found = values(net)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("gather", "schedule"),
    [
        ("parameters", "dear"),
        pytest.param("parameters", "wfbp", marks=pytest.mark.slow),
        ("gradients", "dear"),
    ],
)
def test_a_handler_that_reads_the_model_finds_one_step_and_changes_nothing(
    gather: str, schedule: str
) -> None:
    expected = torch.stack(values_by_step())
    num_read = [0, 0]

    def rank(world: World) -> Tensor:
        def interrupted(net: nn.Module) -> Any:
            def read() -> None:
                num_read[world.rank] += 1
                seen = values(net)
                assert (expected - seen).abs().amax(dim=1).min() < 1e-8, seen

            return interrupted_everywhere(read)

        return train(world, interrupted, gather=gather, schedule=schedule)

    for found in run_ranks(2, rank):
        assert torch.allclose(found, expected[-1], rtol=1e-12)
    assert min(num_read) > 1000


def test_a_step_that_is_broken_off_leaves_parameters_to_save_and_is_told_of() -> None:
    """Ctrl-C in the middle of step(), before anything of it is submitted."""
    expected = values_by_step()

    def rank(world: World) -> str:
        net = make_net()
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(net.parameters(), lr=0.1), net, world=world, bucket_cap_mb=1e-6
        )
        net(inputs_of(0), 0).backward()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(world, "begin_step", interrupt)
            optimizer.step()
        assert torch.equal(values(net), expected[0])
        with pytest.raises(UsageError) as caught:
            optimizer.synchronize()
        return str(caught.value)

    for told in run_ranks(2, rank):
        assert "step() was broken off in the middle, as by a KeyboardInterrupt" in told


def interrupt(training: str) -> None:
    raise KeyboardInterrupt
