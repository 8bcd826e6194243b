"""Each parameter has one owner: training equals one process, and state is at the owner alone."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress, Gather
from dearmpi.engine.iteration import stages
from dearmpi.plan.data.layout import spec_of
from dearmpi.plan.data.plan import Plan, Prediction, fingerprint
from dearmpi.plan.data.schedule import build_schedule
from dearmpi.train.loop.optimizers import MuonWithAdamW, muon_groups
from tests.combinations import pairwise
from tests.mpi.oracle import (
    NEEDS_MUON,
    REDUCE_SCATTERS,
    Case,
    Training,
    assert_equal_on_all_ranks,
    assert_same,
    assert_trains_as_one_process,
    copies,
    flat_state,
    train,
)

ONE_TENSOR, SOME, ALL = 1e-6, 0.0005, 1.0


def cases(**factors: tuple[Any, ...]) -> list[Case]:
    """In which each pair of values occurs."""
    made = [Case(shards="whole", **values) for values in pairwise(factors)]
    return [replace(case, clip=None, micro_batches=1) if case.eager else case for case in made]


MATRICES = cases(
    model=("matrices",),
    optimizer=("muon", "adafactor"),
    reduce_scatter=REDUCE_SCATTERS,
    schedule=("dear", "wfbp", "serial"),
    cap_mb=(ONE_TENSOR, SOME, ALL),
    micro_batches=(1, 3),
    clip=(None, 2.0),
    eager=(False, True),
)
ANY = cases(
    optimizer=("adafactor", "adamw", "nesterov"),
    model=("dense", "branches", "image", "text", "mixed"),
    groups=(1, 3),
    cap_mb=(SOME, ONE_TENSOR, ALL),
)


@pytest.mark.parametrize("case", MATRICES + ANY, ids=lambda case: "-".join(map(str, astuple(case))))
def test_training_equals_one_process(case: Case, world: World) -> None:
    assert_trains_as_one_process(case, world)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_updates_beside_the_thread_that_polls_find_the_same(
    gather: Gather, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LONG_S", 0.0)
    shards: Any = "whole" if gather == "parameters" else "auto"
    for eager in (False, True):
        case = Case(optimizer="adafactor", model="branches", cap_mb=ONE_TENSOR, eager=eager)
        assert_trains_as_one_process(replace(case, gather=gather, shards=shards), world)


@pytest.mark.ranks(at_least=2)
def test_state_is_at_the_owner_alone(world: World) -> None:
    with Training(Case(optimizer="adafactor", shards="whole", cap_mb=ALL), world) as training:
        training.step(0)
        local = training.optimizer.local_state()
        assert not local.whole and not local.pieces
        held = world.all_gather_text(",".join(sorted(local.owned)))
        names = [name for text in held for name in text.split(",") if name]
        assert sorted(names) == sorted(dict(training.model.named_parameters()))
        (bucket,) = training.optimizer.layout
        owned = [bucket.names[slot] for slot in bucket.owned_slots(world.rank)]
        assert sorted(owned) == sorted(local.owned)


class Whitening(torch.optim.Optimizer):
    """Keeps what no element has by itself: matrices of both sides, in a list, and a tuple."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad if param.dim() == 2 else param.grad.reshape(-1, 1)
                state = self.state[param]
                if not state:
                    sides = [torch.eye(n, dtype=param.dtype) for n in grad.shape]
                    state["sides"], state["count"] = sides, (0, 1)
                left, right = state["sides"]
                left.mul_(0.9).add_(grad @ grad.T, alpha=0.1)
                right.mul_(0.9).add_(grad.T @ grad, alpha=0.1)
                state["count"] = (state["count"][0] + 1, 1)
                turned = torch.linalg.solve(left, grad)
                turned = torch.linalg.solve(right, turned.T).T
                param.add_(turned.reshape(param.shape), alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return (outputs - 0.3).square().mean()


def inputs_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * step + rank)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def train_net(world: World, steps: range, *, state: Any = None, **settings: Any) -> Any:
    """Parameters and state after ``steps``, from ``state``; the mean over 6 samples a rank."""
    torch.manual_seed(3)
    model = Net()
    optimizer = DistributedOptimizer(Whitening(model.parameters()), model, world=world, **settings)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in steps:
        optimizer.zero_grad()
        model(inputs_of(step, world.rank)).backward()
        optimizer.step()
    optimizer.synchronize()
    result = copies(model), optimizer.state_dict()
    optimizer.close()
    return result


def train_alone(world: World, steps: range) -> Any:
    torch.manual_seed(3)
    model = Net()
    optimizer = Whitening(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        torch.stack([model(inputs_of(step, rank)) for rank in range(world.size)]).mean().backward()
        optimizer.step()
    return copies(model), optimizer.state_dict()


def assert_alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=1e-10, atol=1e-12)


def test_state_of_any_form_is_gathered_and_loaded(world: World) -> None:
    """ "auto" finds that the optimizer needs whole tensors."""
    expected = train_alone(world, range(8))
    assert_alike(train_net(world, range(8), bucket_cap_mb=1e-4), expected)
    half = train_net(world, range(4), bucket_cap_mb=1e-4)
    assert_alike(train_net(world, range(4, 8), state=half, bucket_cap_mb=1.0), expected)


def test_owners_move_where_buckets_change(world: World) -> None:
    expected = train_alone(world, range(9))
    torch.manual_seed(3)
    model = Net()
    optimizer = DistributedOptimizer(
        Whitening(model.parameters()), model, world=world, shards="whole", bucket_cap_mb=1e-5
    )
    for step in range(9):
        if step in (3, 6):
            optimizer.fuse({3: 1.0, 6: 2e-4}[step])
        optimizer.zero_grad()
        model(inputs_of(step, world.rank)).backward()
        optimizer.step()
    optimizer.synchronize()
    assert_alike((copies(model), optimizer.state_dict()), expected)
    optimizer.close()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("settings", [{}, {"comm_dtype": "bf16"}, {"master_weights": True}])
def test_elementwise_optimizers_find_the_same_by_owners(
    world: World, settings: dict[str, Any]
) -> None:
    """Also where the optimizer works on copies that are wider than what travels."""
    ends = []
    for shards in ("even", "whole"):
        torch.manual_seed(5)
        model = Net().float()
        if "master_weights" in settings:
            model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped = DistributedOptimizer(optimizer, model, world=world, shards=shards, **settings)
        for step in range(5):
            wrapped.zero_grad()
            inputs = inputs_of(step, world.rank).to(next(model.parameters()).dtype)
            model(inputs).backward()
            wrapped.step()
        wrapped.synchronize()
        ends.append((copies(model), flat_state(wrapped.state_dict())))
        assert_equal_on_all_ranks({k: v.float() for k, v in ends[-1][0].items()}, world)
        wrapped.close()
    is_exact = world.size == 2 and "comm_dtype" not in settings
    rtol, atol = (0.0, 0.0) if is_exact else (0.02, 1e-3)
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def mixed(model: nn.Module) -> list[dict[str, Any]]:
    return muon_groups(model, list(model.parameters()))


def train_mixed(world: World | None, size: int, *, apart: bool = False) -> dict[str, Tensor]:
    """Muon on the matrices and AdamW on the rest, in one optimizer or in two (``apart``)."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    groups = mixed(model)
    inner: list[torch.optim.Optimizer] = [MuonWithAdamW(groups, lr=0.02)]
    if apart:
        muon, adamw = (group["params"] for group in groups)
        inner = [
            torch.optim.Muon(muon, lr=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(adamw, lr=0.02, weight_decay=0.1),
        ]
    optimizers: list[torch.optim.Optimizer] = inner
    if world is not None:
        wrapped = [
            DistributedOptimizer(one, model, world=world, bucket_cap_mb=2e-4) for one in inner
        ]
        kinds = [one.layout.buckets[0].cuts.is_even for one in wrapped]
        assert size == 1 or kinds == ([False, True] if apart else [False])
        optimizers = list(wrapped)
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ranks = range(size) if world is None else [world.rank]
        losses = [(model(inputs_of(step, r)) - 0.3).square().mean() for r in ranks]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    if world is not None:
        for one in wrapped:
            one.synchronize()
    found = copies(model)
    if world is not None:
        for one in wrapped:
            one.close()
    return found


@NEEDS_MUON
@pytest.mark.parametrize("apart", [False, True])
def test_muon_on_matrices_and_adamw_on_the_rest(world: World, apart: bool) -> None:
    found = train_mixed(world, world.size, apart=apart)
    assert_equal_on_all_ranks(found, world)
    expected = train_mixed(None, world.size, apart=apart)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


PLANE = torch.linspace(-0.25, 0.25, 64)


@NEEDS_MUON
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_owners_send_quantized_what_replicas_then_show(world: World, compress: Compress) -> None:
    """Replicas are equal to the bit, and learn what they learn in fp32, from half of the bytes:
    what is left out of one step is in the next one.
    """
    losses, traffic = [], []
    for way in ("none", compress):
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 300), nn.Linear(300, 1))
        inner = MuonWithAdamW(mixed(model), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, world=world, compress=way, check_every=5)
        assert not any(bucket.cuts.is_even for bucket in optimizer.layout)
        found = []
        for step in range(30):
            generator = torch.Generator().manual_seed(step * world.size + world.rank)
            inputs = torch.randn(32, 64, generator=generator)
            optimizer.zero_grad()
            loss = (model(inputs)[:, 0] - inputs @ PLANE).square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        optimizer.synchronize()
        assert_equal_on_all_ranks(copies(model), world)
        losses.append(world.all_reduce([found[0], sum(found[-5:]) / 5], "mean"))
        traffic.append(optimizer.traffic.reduced + optimizer.traffic.gathered)
        optimizer.close()
    (first, dense), (_, quantized) = losses
    assert dense < first / 3
    assert quantized == pytest.approx(dense, rel=0.03 if compress == "int8" else 0.25)
    assert traffic[1] < traffic[0] / 2  # one bucket is too small to be compressed


@NEEDS_MUON
def test_state_of_parameters_that_are_cut_follows_them(world: World) -> None:
    """From one cutting to another, and through a whole ``state_dict()``, as torch's is."""

    def train_on(steps: range, *, world: World | None, size: int, state: Any = None) -> Any:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 60))
        model = model.double()
        optimizer: Any = MuonWithAdamW(mixed(model), lr=0.02)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, bucket_cap_mb=1e-3)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        ranks = range(size) if world is None else [world.rank]
        for step in steps:
            if world is not None and step % 4 == 2:
                optimizer.fuse(ALL if step == 2 else 2e-4)
            optimizer.zero_grad()
            losses = [(model(inputs_of(step, r)) - 0.3).square().mean() for r in ranks]
            torch.stack(losses).mean().backward()
            optimizer.step()
        if world is not None:
            optimizer.synchronize()
            local = optimizer.local_state()
            cut = [p for p in local.pieces if 0 < p.tensors["exp_avg"].numel() < p.param.numel()]
            total = world.all_reduce([float(len(cut))], "sum")[0]
            assert total >= 2 * (size > 1)
        found = copies(model), optimizer.state_dict()
        if world is not None:
            optimizer.close()
        return found

    expected = train_on(range(8), world=None, size=world.size)
    found = train_on(range(8), world=world, size=world.size)
    assert_alike(found, expected)
    half = train_on(range(5), world=world, size=world.size)
    assert_alike(train_on(range(5, 8), world=world, size=world.size, state=half), expected)


WEIGHTED = cases(
    optimizer=("adamw", "nesterov"),
    model=("dense", "branches", "mixed"),
    reduce_scatter=REDUCE_SCATTERS,
    cap_mb=(SOME, ONE_TENSOR, ALL),
    clip=(None, 2.0),
    groups=(1, 3),
    eager=(False,),
    micro_batches=(1,),
)


@pytest.mark.parametrize("weights", [(3, 1, 2, 1), (0, 1, 0, 1), (1, 0, 0, 0)], ids=str)
def test_weights_change_no_number(weights: tuple[int, ...], world: World) -> None:
    given = tuple(float(weight) for weight in weights[: world.size])
    for case in WEIGHTED[:: 1 + 2 * (weights[0] < 3)]:
        weighted = replace(case, shards=given if any(given) else (1.0,))
        assert_trains_as_one_process(weighted, world, alone=case)


@pytest.mark.ranks(at_least=2)
def test_state_follows_weights_and_buckets(world: World) -> None:
    case = Case(optimizer="adamw", shards=[1.0, *[3.0] * (world.size - 1)], cap_mb=SOME)
    with Training(case, world) as training:
        for step in range(6):
            if step == 3:
                training.optimizer.fuse(ALL)
            training.step(step)
        found = training.outcome()
        sizes = [bucket.cuts.size_of(0) for bucket in training.optimizer.layout]
        assert max(sizes) < max(bucket.largest_shard for bucket in training.optimizer.layout)
        training.optimizer.load_state_dict(found.optimizer)
        assert_same(training.outcome(), found)
    assert_same(found, train(replace(case, shards="even")))


def plan_for(model: nn.Module, size: int) -> Plan:
    names = [name for name, _ in model.named_parameters()]
    return Plan(
        parameters=tuple(names),
        buckets=(tuple(names[:1]), tuple(names[1:])),
        schedule=build_schedule("dear", 2),
        window=2,
        eager=False,
        world_size=size,
        fingerprint=fingerprint([spec_of(param, name) for name, param in model.named_parameters()]),
        prediction=Prediction(1.0, 0.5, 0.5, 0.75),
        origin="by hand",
    )


@pytest.mark.ranks(at_least=2)
def test_owners_move_with_plans(world: World) -> None:
    """The same plan has the same owners, whatever there was in between."""
    expected = train_alone(world, range(9))
    torch.manual_seed(3)
    model = Net()
    optimizer = DistributedOptimizer(Whitening(model.parameters()), model, world=world)
    plan, planned = plan_for(model, world.size), None
    for step in range(9):
        if step in (2, 6):
            optimizer.follow(plan)
            assert planned in (None, optimizer.layout) and len(optimizer.layout) == 2
            planned = optimizer.layout
        if step == 4:
            optimizer.fuse(1e-5)
            assert len(optimizer.layout) == 4
        optimizer.zero_grad()
        model(inputs_of(step, world.rank)).backward()
        optimizer.step()
    optimizer.synchronize()
    assert_alike((copies(model), optimizer.state_dict()), expected)
    optimizer.close()
