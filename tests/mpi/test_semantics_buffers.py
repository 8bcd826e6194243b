"""Batch normalisation: its statistics over all ranks, and its buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.oracle import copies, fingerprint
from tests.mpi.semantics import (
    NUM_STEPS,
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    outcome,
    seeded,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


class Convolutions(nn.Module):
    """Batch normalisation of rows and of images, with and without parameters and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.BatchNorm1d(NUM_FEATURES, momentum=None)
        self.first = nn.Conv2d(3, 4, 2)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4, momentum=0.3),
            nn.Conv2d(4, 5, 1),
            nn.BatchNorm2d(5, affine=False),
            nn.Tanh(),
            nn.BatchNorm2d(5, track_running_stats=False),
        )
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        images = self.start(inputs + 100.0).view(-1, 3, 2, 2)
        outputs: Tensor = self.last(self.norms(self.first(images)).flatten(1).tanh())
        return outputs


def converted(side: Side, world: World) -> nn.Module:
    model: nn.Module = seeded(Convolutions)
    return dearmpi.convert_sync_batchnorm(model, world) if side.is_distributed else model


def test_sync_batch_norm_is_that_of_one_process_with_the_whole_batch(
    gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = converted(side, world)
        optimizer = side.wrap(adam(model), model)
        seen = {}
        for step in range(NUM_STEPS):
            train(side, model.train(), optimizer, 1)
            with torch.no_grad():
                seen[f"evaluation {step}"] = model.eval().start(whole_batch(9)).clone()  # type: ignore[operator]
        return {**seen, **outcome(model, optimizer)}

    # The statistics are of inputs around 100, whose squares have four digits more.
    assert_same_on_both_sides(script, world, gather=gather, rtol=1e-8, atol=1e-10)


def test_sync_batch_norm_passes_gradients_to_its_inputs(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = converted(side, world)
        inputs = [side.inputs(step).requires_grad_() for step in range(2)]
        sum(side.average(squared_error(model(x))) for x in inputs).backward()
        gradients = torch.zeros(2, len(whole_batch(0)), NUM_FEATURES, dtype=torch.float64)
        for whole, own in zip(gradients, inputs, strict=True):
            assert own.grad is not None
            side.share(whole).copy_(own.grad / side.size)
        if side.is_distributed:
            flat = world.all_reduce(gradients.flatten().tolist())
            gradients = torch.tensor(flat, dtype=torch.float64).view_as(gradients)
        return {"gradients": gradients}

    assert_same_on_both_sides(script, world, gather=gather, rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(2, 3)
def test_sync_batch_norm_of_a_rank_without_samples(gather: str, world: World) -> None:
    layer = dearmpi.SyncBatchNorm(NUM_FEATURES, world=world).double()
    inputs = whole_batch(0)[:0] if world.rank == 1 else whole_batch(world.rank)
    (layer(inputs.requires_grad_()) ** 3).sum().backward()
    plain = nn.BatchNorm1d(NUM_FEATURES).double()
    parts = [whole_batch(rank) for rank in range(world.size) if rank != 1]
    whole = torch.cat(parts).requires_grad_()
    (plain(whole) ** 3).sum().backward()
    torch.testing.assert_close(dict(layer.state_dict()), dict(plain.state_dict()))
    assert whole.grad is not None
    first = sum(len(whole_batch(rank)) for rank in range(world.rank) if rank != 1)
    torch.testing.assert_close(inputs.grad, whole.grad[first : first + len(inputs)])


@pytest.mark.ranks(2, 3)
def test_sync_batch_norm_waits_for_nobody_in_evaluation(gather: str, world: World) -> None:
    layer = dearmpi.SyncBatchNorm(NUM_FEATURES, track_running_stats=False, world=world).double()
    plain = nn.BatchNorm1d(NUM_FEATURES, track_running_stats=False).double()
    if world.is_root:
        torch.testing.assert_close(layer.eval()(whole_batch(0)), plain.eval()(whole_batch(0)))


def test_sync_batch_norm_in_half_precision_keeps_its_statistics_in_single(
    gather: str, world: World
) -> None:
    layer = dearmpi.SyncBatchNorm(NUM_FEATURES, world=world)
    inputs = (whole_batch(world.rank) + 30.0).to(torch.bfloat16)
    outputs = layer(inputs)
    assert outputs.dtype == torch.bfloat16
    assert layer.running_var is not None and layer.running_var.dtype == torch.float32
    whole = torch.cat([whole_batch(r) + 30.0 for r in range(world.size)]).to(torch.bfloat16)
    expected = 0.9 + 0.1 * whole.float().var(0)
    torch.testing.assert_close(layer.running_var, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.ranks(2, 3)
def test_sync_batch_norm_refuses_what_has_no_variance(gather: str, world: World) -> None:
    layer = dearmpi.SyncBatchNorm(NUM_FEATURES, world=world).double()
    with pytest.raises(ValueError, match="at least 2"):
        layer(whole_batch(0)[: int(world.is_root)])
    with pytest.raises(ValueError, match=f"C = {NUM_FEATURES}"):
        layer(torch.zeros(4, NUM_FEATURES + 1))


def test_a_model_with_sync_batch_norm_can_be_copied(gather: str, world: World) -> None:
    model = dearmpi.convert_sync_batchnorm(seeded(Convolutions), world)
    twin = copy.deepcopy(model)
    model(whole_batch(0))
    before = fingerprint(copies(twin))
    assert before != fingerprint(copies(model))
    twin(whole_batch(0))
    assert fingerprint(copies(twin)) == fingerprint(copies(model))


def statistics(world: World, gather: str, buffers: str) -> list[Tensor]:
    """Every rank's own statistics of its own samples, and those that it has after a step; behind
    them its number, in a buffer of half precision.
    """
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4)).double()
    model.register_buffer("number", torch.zeros(1, dtype=torch.bfloat16))
    side = Side(world, gather=gather, buffers=buffers)
    optimizer = side.wrap(adam(model), model)
    number = model.get_buffer("number").fill_(world.rank)
    own = side.inputs(0) + world.rank
    expected = copy.deepcopy(model)
    expected(own)
    squared_error(model(own)).backward()
    optimizer.step()
    norm, before = model[1], expected[1]
    assert isinstance(norm, nn.BatchNorm1d) and isinstance(before, nn.BatchNorm1d)
    assert norm.running_mean is not None and before.running_mean is not None
    assert norm.num_batches_tracked == 1
    side.close()
    own_number = torch.tensor([world.rank], dtype=torch.float64)
    return [
        torch.cat([before.running_mean, own_number]),
        torch.cat([norm.running_mean, number.double()]),
    ]


def every_rank(world: World, values: Tensor) -> Tensor:
    """(size, ...): the values of all ranks."""
    rows = torch.zeros(world.size, *values.shape, dtype=torch.float64)
    rows[world.rank] = values
    sums = world.all_reduce(rows.flatten().tolist())
    return torch.tensor(sums, dtype=torch.float64).view_as(rows)


def test_buffers_are_kept_by_default(gather: str, world: World) -> None:
    assert dearmpi.EngineConfig().buffers == "keep"
    own, after = statistics(world, gather, "keep")
    assert torch.equal(after, own)


def test_buffers_are_broadcast_on_request(gather: str, world: World) -> None:
    own, after = statistics(world, gather, "broadcast")
    torch.testing.assert_close(after, every_rank(world, own)[0])


def test_buffers_are_averaged_on_request(gather: str, world: World) -> None:
    own, after = statistics(world, gather, "average")
    torch.testing.assert_close(after, every_rank(world, own).mean(0))
