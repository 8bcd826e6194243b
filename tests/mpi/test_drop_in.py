"""Scripts written for DistributedDataParallel give the numbers that they give with torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchsWrapper

import dearmpi
from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.comm.world import World
from dearmpi.config import Compress, EngineConfig, Gather
from dearmpi.drop_in.served_optimizer import KnownOptimizers
from dearmpi.drop_in.serving import Chosen
from dearmpi.drop_in.start import ZeroRedundancyOptimizer
from dearmpi.engine.setup.codec_choice import CodecChoice
from dearmpi.errors import ArgumentError, ConfigError, MismatchError, UsageError
from tests.codes import raises
from tests.mpi.ddp_scripts import SCRIPTS, Job, Trained, loss_of, network

pytestmark = pytest.mark.ranks(2, 3)
TOLERANCE = 1e-10


@pytest.fixture(scope="module", autouse=True)
def _group(world: World) -> Iterator[None]:
    """torch.distributed over gloo, for torch's wrapper."""
    join_group(world)
    yield
    leave_group(failed=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_what_it_trains_with_torchs_wrapper(name: str, world: World) -> None:
    script, rank, size = SCRIPTS[name], world.rank, world.size
    expected = script(Job(TorchsWrapper, rank, size))
    torch.compiler.reset()
    found = script(Job(dearmpi.DistributedDataParallel, rank, size, ZeroRedundancyOptimizer))
    torch.compiler.reset()
    assert found.seen == pytest.approx(expected.seen, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
    difference = max(
        [
            *(_difference(*pair) for pair in _pairs(found, expected)),
            *(abs(one - other) for one, other in zip(found.seen, expected.seen, strict=True)),
        ]
    )
    if world.is_root:
        print(f"{name}: {difference:.1e}")


@pytest.mark.parametrize(
    "name",
    ["optimizers_by_turns", "wrapped_again", "state_begun_anew", "uneven_inputs_with_buffers"],
)
def test_an_optimizer_in_shards_trains_the_same(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chosen, "choices", EngineConfig(gather="parameters"))
    script, rank, size = SCRIPTS[name], world.rank, world.size
    (expected, *_) = script(Job(TorchsWrapper, rank, size)).models
    (found, *_) = script(Job(dearmpi.DistributedDataParallel, rank, size)).models
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        _difference(one, other)


def _pairs(found: Trained, expected: Trained) -> Iterator[tuple[Any, Any]]:
    for model, other in zip(found.models, expected.models, strict=True):
        states = model.state_dict(), other.state_dict()
        assert list(states[0]) == list(states[1])
        yield from zip(*(state.values() for state in states), strict=True)
    for optimizer, twin in zip(found.optimizers, expected.optimizers, strict=True):
        assert type(optimizer) is type(twin)
        state, of_twin = optimizer.state_dict(), twin.state_dict()
        assert state["param_groups"] == of_twin["param_groups"]
        assert state["state"].keys() == of_twin["state"].keys()
        for number, entries in of_twin["state"].items():
            assert state["state"][number].keys() == entries.keys()
            yield from ((state["state"][number][key], entries[key]) for key in entries)


def _difference(found: Any, expected: Any) -> float:
    if expected is None:
        assert found is None
        return 0.0
    one, other = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    return float((one - other).abs().max())


def test_batch_normalisation_is_over_all_ranks(world: World) -> None:
    def train(model: Any, batches: list[Tensor]) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs in batches:
            optimizer.zero_grad()
            (model(inputs) - 0.3).pow(3).mean().backward()
            optimizer.step()
        trained: nn.Module = getattr(model, "module", model)
        return trained

    def build() -> nn.Module:
        return nn.Sequential(network(), nn.BatchNorm1d(3, dtype=torch.float64))

    job = Job(TorchsWrapper, world.rank, world.size)
    ranks = range(world.size)
    alone = train(build(), [torch.cat([job.batch(s, r) for r in ranks]) for s in range(4)])
    model = dearmpi.convert_sync_batchnorm(build())
    wrapped = train(dearmpi.DistributedDataParallel(model), [job.batch(s) for s in range(4)])
    for one, other in zip(wrapped.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("compress", ["int8", "topk"])
def test_what_travels_may_be_compressed(
    compress: Compress, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have the same gradients, so that one that trains alone comes to the same."""
    gather: Gather = "gradients" if compress == "int8" else "parameters"
    monkeypatch.setattr(Chosen, "choices", EngineConfig(gather=gather, compress=compress))

    def train(model: nn.Module) -> float:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
        for _ in range(60):
            optimizer.zero_grad()
            losses.append(loss := (model(inputs) - inputs.flip(1)).square().mean())
            loss.backward()
            optimizer.step()
        return float(losses[-1].detach() / losses[0].detach())

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(256, 256)

    alone, wrapped = train(build()), train(dearmpi.DistributedDataParallel(build()))
    limit = 0.02 if compress == "int8" else 0.3
    assert abs(wrapped - alone) < limit, (wrapped, alone)
    assert wrapped != alone or world.size == 1


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
def test_what_travels_is_chosen_once(
    gather: Gather, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where parameters then lie elsewhere, as they do after the script has moved a model."""
    asked: list[int] = []

    def predict(self: CodecChoice, micro_batches: int) -> dict[str, float]:
        asked.append(micro_batches)
        return {"fp32": 1.0, "int8": 0.5}

    monkeypatch.setattr(CodecChoice, "_predict", predict)
    monkeypatch.setattr(Chosen, "choices", EngineConfig(gather=gather, compress="auto"))
    torch.manual_seed(0)
    model = dearmpi.DistributedDataParallel(nn.Linear(256, 257))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for _ in range(16):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    served = KnownOptimizers.served[optimizer]()
    assert served is not None
    assert asked == [1] and served.engine.config.compress == "int8"
    assert losses[-1] < 0.5 * losses[0]
    assert len(optimizer.state) == 2


def test_a_half_precision_hook_sends_half_the_bytes(world: World) -> None:
    model = dearmpi.DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = network()
    job = Job(TorchsWrapper, world.rank, world.size)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        for rank in range(world.size):
            (loss_of(exact(job.batch(step, rank))) / world.size).backward()
        with torch.no_grad():
            for param in exact.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
    worst = max(
        float((one - other).detach().abs().max())
        for one, other in zip(model.parameters(), exact.parameters(), strict=True)
    )
    assert 0 < worst < 1e-2


def test_one_rank_may_read_a_gradient_and_the_optimizers_state(world: World) -> None:
    model = dearmpi.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    params: list[Any] = list(model.parameters())
    job = Job(TorchsWrapper, world.rank, world.size)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        if world.is_root:  # norms first, which torch's clipping has ranks find together
            norms = [float(p.grad.data.norm(2)) for p in params]
            squares = [float(p.grad.square().sum()) for p in params]
            assert norms == pytest.approx([math.sqrt(one) for one in squares])
        optimizer.step()
        if world.is_root:
            assert len(optimizer.state_dict()["state"]) == 6


def test_one_rank_may_evaluate_before_training_and_after_each_step(world: World) -> None:
    module = nn.Sequential(network(), nn.BatchNorm1d(3, dtype=torch.float64))
    model = dearmpi.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(TorchsWrapper, world.rank, world.size)
    for step in range(3):
        if world.is_root:
            model.eval()
            with torch.no_grad():
                assert bool(model(job.batch(step)).isfinite().all())
            model.train()
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        values = world.all_gather_object([b.tolist() for b in module.buffers()])
        assert all(one == values[0] for one in values)


def test_what_cannot_be_served_is_refused_by_name(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    wrap = dearmpi.DistributedDataParallel
    with raises(ArgumentError, "ddp-not-served", "mixed_precision"):
        wrap(network(), mixed_precision=object())
    told = nn.Linear(2, 2)
    told._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    with raises(ArgumentError, "ddp-not-served", "leave out bias"):
        wrap(told)
    with raises(ArgumentError, "unknown-argument", "buckets"):
        wrap(network(), buckets=3)  # type: ignore[call-arg]
    model = wrap(network(), gradient_as_bucket_view=True, static_graph=True)
    said = capsys.readouterr().err
    assert ("gradient_as_bucket_view, static_graph" in said) is world.is_root
    with raises(ConfigError, "ddp-not-served", "quantize"):
        model.register_comm_hook(None, _quantize)
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    with raises(ConfigError, "ddp-not-served", "without a wrapper"):
        model.register_comm_hook(None, wrapped)
    with raises(ArgumentError, "ddp-not-served"), model.join(divide_by_initial_world_size=False):
        pass
    with raises(UsageError, "join-misused", "one optimizer"), model.join():
        pass
    with raises(UsageError, "ddp-not-served", "model.join()"):
        model.join_hook()


def test_a_model_of_which_a_part_is_wrapped_once_more_is_refused(world: World) -> None:
    module = network()
    whole = dearmpi.DistributedDataParallel(module)
    part = dearmpi.DistributedDataParallel(module[0])
    part(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    with raises(UsageError, "parameter-taken", "wrapped once more"):
        whole(torch.ones(2, 6, dtype=torch.float64))


def test_models_that_look_alike_do_not_join_each_other(world: World) -> None:
    """Shapes and settings are equal, so that their gradients would be averaged."""
    models = [dearmpi.DistributedDataParallel(network()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    own = models[0 if world.is_root else 1]
    told = "the first use of the optimizer of DistributedDataParallel"
    with raises(MismatchError, "ranks-in-different-calls", told), own.join():
        pass
    assert [len(optimizer.state) for optimizer in optimizers] == [0, 0]


def _quantize(state: object, bucket: object) -> None:
    """A hook of a script's own."""
