"""What a script does with gradients that cannot be served is refused, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather, ScheduleName
from dearmpi.errors import ConfigError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import Case, Training
from tests.unit.engine.stage import wait_for


def layer(world: World, *, gather: Gather, eager: bool) -> tuple[nn.Linear, DistributedOptimizer]:
    """A model of one layer, and its optimizer."""
    model = nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, DistributedOptimizer(inner, model, world=world, gather=gather, eager=eager)


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_no_sync_after_a_synchronizing_backprop_is_refused(schedule: ScheduleName) -> None:
    def rank(world: World) -> None:
        with Training(Case(schedule=schedule), world) as training:
            training.step(0)
            training.backward(1)
            with raises(UsageError, "no-sync-misplaced", "no_sync"), training.no_sync():
                training.backward(2)
            training.optimizer.zero_grad()

    run_ranks(2, rank)


def test_gradients_under_way_cannot_be_read_unnoticed() -> None:
    """This rank has but a part of them."""

    def rank(world: World) -> None:
        with Training(Case(), world) as training:
            training.backward(0)
            weight: Any = training.model.get_parameter("layers.0.weight")
            grad = weight.grad
            for look in (grad.sum, grad.clone, grad.tolist, lambda: grad[0], lambda: grad.add_(1)):
                with raises(UsageError, "gradient-in-reduction", "optimizer.gradients"):
                    look()
            with raises(UsageError, "gradient-in-reduction", "optimizer.gradients"):
                grad.norm(dim=0)
            with raises(UsageError, "gradient-in-reduction", "optimizer.gradients"):
                grad.mul_(torch.ones_like(weight))
            training.optimizer.zero_grad()

    run_ranks(2, rank)


@pytest.mark.parametrize("case", [Case(), Case(model="branches", cap_mb=1.0)])
def test_gradients_cleared_behind_the_optimizer_s_back_are_noticed(case: Case) -> None:
    """Also those of a bucket that waits for others: no branch but one has a gradient."""

    def rank(world: World) -> None:
        training = Training(case, world)
        training.backward(0)
        training.model.zero_grad()
        with raises(UsageError, "gradient-replaced", "optimizer.zero_grad"):
            training.optimizer.step()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda model, inner: (model, inner), "optimizer is of type Linear, not Optimizer"),
        (lambda model, inner: (inner, [*model.parameters()]), "model is of type list, not Module"),
        (lambda model, inner: (torch.optim.SGD, model), "optimizer is of type type, not Optimizer"),
    ],
)
def test_what_is_no_optimizer_or_no_model_is_named(
    arguments: Callable[[Any, Any], tuple[Any, Any]], told: str
) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        given = arguments(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with raises(ConfigError, "wrong-type", told, "DistributedOptimizer"):
            DistributedOptimizer(*given, world=world)

    run_ranks(1, rank)


@pytest.mark.parametrize(
    ("plan", "told"), [("atuo", "cannot read the plan 'atuo'"), (7, "plan is of type int")]
)
def test_a_plan_that_is_none_is_told_what_may_be_given(plan: Any, told: str) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=f"{told}.*give 'auto', the path of a plan"):
            DistributedOptimizer(inner, model, world=world, plan=plan)

    run_ranks(1, rank)


@pytest.mark.parametrize("compiled", ["around", "inside", "a part"])
def test_a_job_does_not_plan_for_a_compiled_model(compiled: str) -> None:
    """Which it would find out after five iterations only, or not at all."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    if compiled == "around":
        model = torch.compile(model, backend="eager")
    else:
        (model if compiled == "inside" else model[1]).compile(backend="eager")

    def rank(world: World) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        what = "module 1" if compiled == "a part" else "the model"
        with raises(ConfigError, "plan-of-compiled-model", what):
            DistributedOptimizer(optimizer, model, world=world, plan="auto")
        DistributedOptimizer(optimizer, model, world=world).close()

    run_ranks(1, rank)


class FindsItsRate(torch.optim.SGD):
    """Whose rate grows with the gradients that it meets, and is one for all, as Prodigy's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            norms = [float(param.grad.norm()) for param in group["params"]]
            group["d"] = group.get("d", 1e-3) + sum(norms)
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] * group["d"])


class PassesOn(torch.optim.Optimizer):
    """Steps an optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


class ScalesByNorm(torch.optim.SGD):
    """Steps that are as long as the parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                ratio = param.data.norm() / param.grad.norm()
                param.data.add_(param.grad, alpha=-group["lr"] * float(ratio))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda params: FindsItsRate(params, lr=0.1),
            "changes 'd' of its param groups by .*train it on one rank, or .*AdamWScheduleFree",
        ),
        (
            lambda params: PassesOn(torch.optim.SGD(params, lr=0.1)),
            r"changes nothing.*wrap the optimizer inside.*p\.grad is None, and .*synchronize\(\)",
        ),
    ],
    ids=["finds its rate", "passes on"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_buckets_would_mislead_is_refused(
    size: int, make: Callable[[Any], torch.optim.Optimizer], told: str, gather: Any
) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = make(model.parameters())
        if world.size == 1 and isinstance(inner, FindsItsRate):  # which sees all there
            DistributedOptimizer(inner, model, world=world, gather=gather).close()
            return
        with pytest.raises(ConfigError, match=told):
            DistributedOptimizer(inner, model, world=world, gather=gather)

    run_ranks(size, rank)


@pytest.mark.parametrize("rate", [0.0, 1e-9, torch.tensor(0.0)])
def test_a_schedule_that_begins_at_zero_hides_no_norms(rate: float | torch.Tensor) -> None:
    """At a rate of zero whole tensors and pieces of them are updated alike: not at all."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = ScalesByNorm(model.parameters(), lr=rate)
        with raises(ConfigError, "optimizer-needs-whole-tensors", "treat every element by itself"):
            DistributedOptimizer(optimizer, model, world=world, shards="even")

    run_ranks(2, rank)


def test_complex_numbers_do_not_travel_in_half_precision() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2, dtype=torch.complex64)
        with raises(ConfigError, "dtype-not-served", "torch.complex64"):
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, comm_dtype="bf16"
            )

    run_ranks(2, rank)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_backprop_through_a_graph_from_before_the_step_is_torchs_error(
    gather: Any, eager: bool
) -> None:
    """As in one process: its weights are gone, or half gone."""

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            gather=gather,
            eager=eager,
        )
        one, other = (model(torch.ones(1, 3) * number).sum() for number in (1, 2))
        one.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        optimizer.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_forward_past_the_modules_is_refused_unless_it_is_synchronized(
    gather: Gather, eager: bool
) -> None:
    """As that of a traced model, which calls no hook: it may use values of before the step."""

    def rank(world: World) -> None:
        model, optimizer = layer(world, gather=gather, eager=eager)
        weight, bias = model.weight, model.bias

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.linear(torch.ones(2, 4), weight, bias).sum().backward()
            optimizer.step()

        step()
        optimizer.synchronize()
        step()
        assert torch.equal(model.bias, bias) and torch.equal(model.weight, weight)
        step()  # has been read
        with raises(UsageError, "read-of-stale-parameter", "optimizer.synchronize()"):
            step()

    run_ranks(2, rank)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("reader", ["forward", "state_dict", "synchronize"])
def test_a_parameter_written_before_its_new_value_has_come_is_refused(
    gather: Gather, eager: bool, reader: str
) -> None:
    """As by those who clip weights through a list made before the loop."""

    def rank(world: World) -> None:
        model, optimizer = layer(world, gather=gather, eager=eager)
        params = list(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        for wait in (optimizer.synchronize, lambda: model.weight, lambda: next(model.parameters())):
            step()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            step()
            wait()
            with torch.no_grad():
                params[0].clamp_(-1.5, 1.5)
            read = model.state_dict()
            assert torch.equal(read["weight"], (before["weight"] - 2.0).clamp(-1.5, 1.5))
        step()
        engine: Any = optimizer._built.engine
        # The fake network would refuse a write during a gather, in its own words.
        wait_for(engine.state.iteration.is_finished, "the end of the gathers")
        world.barrier()
        with torch.no_grad():
            params[1].clamp_(-1.5, 1.5)
        readers: dict[str, Callable[[], object]] = {
            "forward": lambda: model(torch.ones(2, 4)),
            "state_dict": model.state_dict,
            "synchronize": optimizer.synchronize,
        }
        with raises(UsageError, "parameter-written-too-early", "bias", "optimizer.synchronize()"):
            readers[reader]()

    run_ranks(2, rank)


def test_a_graph_that_was_not_used_before_the_step_is_no_reading_of_old_values() -> None:
    def rank(world: World) -> None:
        heads = [nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)]
        model = nn.ModuleList(heads)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, world=world
        )
        before = [head.weight.clone() for head in heads]
        for loss in [head(torch.ones(1, 2)).sum() for head in heads]:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for head, old in zip(heads, before, strict=True):
            assert torch.equal(head.weight, old - 1.0)

    run_ranks(2, rank)


def test_reading_a_bucket_that_lacks_a_frozen_gradient_before_the_step_is_refused() -> None:
    """The update waits for the roll call, which step() makes."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            eager=True,
            bucket_cap_mb=1,  # both in one bucket
        )
        model.bias.requires_grad_(False)
        model(torch.ones(1, 3)).sum().backward()
        with raises(UsageError, "parameters-read-too-early", "between backward and step"):
            _ = model.weight
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


def test_gradients_of_which_some_are_cleared_are_refused_in_the_next_backprop() -> None:
    def rank(world: World) -> None:
        training = Training(Case(), world)
        training.backward(0)
        next(iter(training.model.children())).zero_grad()
        with raises(UsageError, "gradient-replaced", "optimizer.zero_grad"):
            training.backward(1)
        training.optimizer.zero_grad()
        training.backward(1)
        training.optimizer.step()

    run_ranks(2, rank)


@pytest.mark.parametrize("from_start", [True, False])
@pytest.mark.parametrize("schedule", ["dear", "serial"])
def test_a_layer_that_is_unfrozen_between_two_backprops_is_refused(
    schedule: ScheduleName, from_start: bool
) -> None:
    """The step's collectives are under way without it, whether or not it has its own bucket."""

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[1].requires_grad_(not from_start)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world, schedule=schedule, bucket_cap_mb=1)
        model[1].requires_grad_(False)
        model(torch.ones(1, 3)).sum().backward()
        model[1].requires_grad_(True)
        with raises(UsageError, "frozen-between-backwards", "1.", "was unfrozen"):
            model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, rank)


def test_a_layer_that_is_frozen_while_its_gradients_are_kept_is_refused() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, world=world
        )
        with optimizer.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        model[0].requires_grad_(False)
        with raises(UsageError, "frozen-between-backwards", "0.weight", "was frozen"):
            model(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)
