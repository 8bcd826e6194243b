"""Large gradients that are a bucket by themselves: reduced where autograd has written them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena, FlatBuffer, GradientMemory
from dearmpi.plan.data.layout import ParamSpec, build_layout
from tests.combinations import pairs_of
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

SIZE = 2
ROWS, WIDTH = 1024, 256  # 1 MiB


class Tied(nn.Module):
    """An embedding that is the decoder as well, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        fill(self)

    def forward(self, rank: int) -> Tensor:
        hidden = self.layer(self.embedding(torch.tensor([1, 5, 7 + rank]))).tanh()
        scores: Tensor = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(scores, torch.tensor([5, 7, 2]))


Script = Callable[[Tied, Any, Callable[[], None]], None]


def once(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        backward()
        optimizer.step()


def accumulated(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        if isinstance(optimizer, DistributedOptimizer):
            with optimizer.no_sync():
                backward()
        else:
            backward()
        backward()
        optimizer.step()


def reduced_twice(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        backward()
        optimizer.step()


def dropped(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    backward()
    optimizer.zero_grad()
    once(model, optimizer, backward)


def clipped(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.clip_grad_norm_(1e-3)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def frozen_for_a_step(model: Tied, optimizer: Any, backward: Callable[[], None]) -> None:
    for trains in (True, False, True):
        model.embedding.weight.requires_grad = trains
        once(model, optimizer, backward)


def train(script: Script, world: World | None, **config: Any) -> list[Tensor]:
    model = Tied()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if world is not None:
        optimizer = DistributedOptimizer(optimizer, model, world=world, bucket_cap_mb=0.5, **config)

    def backward() -> None:
        ranks = range(SIZE) if world is None else (world.rank,)
        torch.stack([model(rank) for rank in ranks]).mean().backward()

    script(model, optimizer, backward)
    if world is not None:
        optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@pairs_of(
    script=[once, accumulated, reduced_twice, dropped, clipped, frozen_for_a_step],
    schedule=["dear", "wfbp", "serial"],
    gather=["parameters", "gradients"],
)
def test_training_is_that_of_one_process(script: Script, schedule: str, gather: str) -> None:
    alone = train(script, None)
    found = run_ranks(SIZE, lambda world: train(script, world, schedule=schedule, gather=gather))
    for values in found:
        for one, other in zip(values, alone, strict=True):
            torch.testing.assert_close(one, other)


def one_parameter(like: Tensor, *, world_size: int = SIZE) -> tuple[BucketRuntime, nn.Parameter]:
    """A bucket of one parameter, which expects its gradient."""
    param = nn.Parameter(like.clone(memory_format=torch.preserve_format))
    dtype = str(param.dtype).removeprefix("torch.")
    spec = ParamSpec("weight", tuple(param.shape), param.itemsize, dtype)
    layout = build_layout([[spec]], world_size)
    gradients, parameters = Arena(layout), Arena(layout)
    bucket = BucketRuntime(
        layout.buckets[0], [param], rank=0, gradients=gradients, parameters=parameters
    )
    bucket.expect_gradients(quietly=False)
    return bucket, param


def is_adopted(bucket: BucketRuntime, param: nn.Parameter) -> bool:
    """Whether the bucket takes the memory of ``param.grad``, not its values alone."""
    assert param.grad is not None
    address, values = param.grad.data_ptr(), param.grad.clone()
    bucket.take_gradient(0)
    assert torch.equal(bucket.gradients.views[0], values)
    return bucket.gradients.data.data_ptr() == address


MATRIX = torch.zeros(ROWS, WIDTH)
IMAGES = torch.zeros(64, 64, 8, 8).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("like", [MATRIX, MATRIX.double(), IMAGES], ids=lambda t: str(t.dtype))
def test_a_gradient_that_is_all_of_a_bucket_is_not_copied(like: Tensor) -> None:
    bucket, param = one_parameter(like)
    param.grad = torch.randn_like(like)
    assert is_adopted(bucket, param)


@pytest.mark.parametrize(
    ("like", "world_size"),
    [
        (torch.zeros(ROWS, WIDTH - 1), 2),  # less than a mebibyte
        (torch.zeros(ROWS + 1, WIDTH + 1), 2),  # an odd number: something must be behind it
    ],
)
def test_others_are_copied(like: Tensor, world_size: int) -> None:
    bucket, param = one_parameter(like, world_size=world_size)
    param.grad = torch.randn_like(like)
    assert not is_adopted(bucket, param)


def test_a_gradient_in_another_order_is_copied() -> None:
    bucket, param = one_parameter(IMAGES.contiguous())
    param.grad = torch.randn_like(IMAGES)
    assert not is_adopted(bucket, param)


def keep_tensor(param: nn.Parameter) -> Any:
    return param.grad


def keep_view(param: nn.Parameter) -> Any:
    assert param.grad is not None
    return param.grad[0]


def keep_storage(param: nn.Parameter) -> Any:
    assert param.grad is not None
    return param.grad.untyped_storage()


def keep_array(param: nn.Parameter) -> Any:
    assert param.grad is not None
    return param.grad.numpy()


@pytest.mark.parametrize("keep", [keep_tensor, keep_view, keep_storage, keep_array])
def test_what_a_script_has_kept_stays_its_own_gradient(
    keep: Callable[[nn.Parameter], Any],
) -> None:
    bucket, param = one_parameter(MATRIX)
    param.grad = torch.randn_like(MATRIX)
    kept = keep(param)
    assert not is_adopted(bucket, param)
    del kept


def from_array(grad: Tensor) -> Tensor:
    return torch.from_numpy(ARRAY)


def from_shared_memory(grad: Tensor) -> Tensor:
    grad.share_memory_()
    return grad


def expanded(grad: Tensor) -> Tensor:
    return grad[:1, :1].clone().expand_as(grad)


ARRAY = np.ones((ROWS, WIDTH), np.float32)


@pytest.mark.parametrize("make", [from_array, from_shared_memory, expanded])
def test_memory_that_is_not_torch_s_alone_is_left_as_it_is(
    make: Callable[[Tensor], Tensor],
) -> None:
    bucket, param = one_parameter(MATRIX)
    param.grad = make(torch.randn_like(MATRIX))
    assert not is_adopted(bucket, param)


def test_a_conjugate_that_is_not_computed_yet_is_copied() -> None:
    like = torch.zeros(ROWS, WIDTH, dtype=torch.complex64)
    bucket, param = one_parameter(like)
    param.grad = torch.randn_like(like).conj().detach()  # which has no base that shares it
    assert not is_adopted(bucket, param)
    bucket, param = one_parameter(like)
    param.grad = torch.randn_like(like)
    assert is_adopted(bucket, param)


def test_a_part_of_larger_memory_is_copied() -> None:
    """Which would be held as a whole."""
    bucket, param = one_parameter(MATRIX)
    param.grad = torch.randn(2 * ROWS, WIDTH)[:ROWS]
    assert not is_adopted(bucket, param)


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="torch 2.6 holds the gradient of a tied parameter itself, so it is copied",
)
def test_an_update_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an embedding of hundreds of megabytes, before the next activations need it."""
    adopted: list[weakref.ref[FlatBuffer]] = []
    adopt = GradientMemory.adopt

    def recorded(memory: GradientMemory, taken: list[Tensor]) -> bool:
        if adopt(memory, taken):
            adopted.append(weakref.ref(memory.buffer))
            return True
        return False

    monkeypatch.setattr(GradientMemory, "adopt", recorded)

    def rank(world: World) -> None:
        model = Tied()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=0.5)
        model(world.rank).backward()
        optimizer.clip_grad_norm_(math.inf)
        world.barrier()
        assert [ref() is None for ref in adopted] == [False] * SIZE
        world.barrier()
        optimizer.step()
        optimizer.synchronize()
        world.barrier()
        assert [ref() is None for ref in adopted] == [True] * SIZE
        optimizer.close()

    run_ranks(SIZE, rank)
