"""What a script does to param groups and state reaches the updates, or is refused."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

Act = Callable[[Any, torch.optim.Optimizer, nn.Sequential], object]

SIZES = pytest.mark.parametrize("size", [1, 2])
GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])


def make(world: World, **settings: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """An Adam over two of three layers, in two groups, after a step."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    fill(model)
    groups = [{"params": list(layer.parameters())} for layer in model[:2]]
    inner = torch.optim.Adam(groups, lr=0.1)
    optimizer = DistributedOptimizer(inner, model, world=world, **settings)
    step(optimizer, model)
    return optimizer, inner, model


def step(optimizer: Any, model: nn.Module) -> None:
    """One iteration."""
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def move(groups: list[dict[str, Any]]) -> None:
    """The last of the first group goes to the second."""
    groups[1]["params"].append(groups[0]["params"].pop())


def append(groups: list[dict[str, Any]], model: nn.Sequential) -> None:
    """A group, past add_param_group()."""
    groups.append({**groups[0], "params": list(model[2].parameters())})


@SIZES
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda o, i, m: i.add_param_group({"params": m[2].parameters()}), "add_param_group()"),
        (lambda o, i, m: append(o.param_groups, m), "add_param_group()"),
        (lambda o, i, m: o.param_groups[0]["params"].append(m[2].weight), "add_param_group()"),
        (lambda o, i, m: move(o.param_groups), "moved between param groups"),
        (lambda o, i, m: o.param_groups[0]["params"].pop(), "removed from"),
        (lambda o, i, m: o.param_groups.pop(), "removed from"),
        (lambda o, i, m: i.load_state_dict(o.state_dict()), "load_state_dict.. of the Distr"),
    ],
    ids=["inner add", "append group", "append param", "move", "remove", "remove group", "load"],
)
def test_parameters_that_change_groups_past_the_optimizer_are_refused(
    act: Act, told: str, size: int
) -> None:
    """They would train, or not, as before."""

    def rank(world: World) -> None:
        optimizer, inner, model = make(world)
        act(optimizer, inner, model)
        with pytest.raises(UsageError, match=told):
            step(optimizer, model)

    run_ranks(size, rank)


@SIZES
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (
            lambda o: setattr(o, "param_groups", deepcopy(o.param_groups)),
            "set options in the groups that are there",
        ),
        (lambda o: setattr(o, "state", defaultdict(dict)), "load a state with load_state_dict"),
    ],
    ids=["param_groups", "state"],
)
def test_groups_and_state_cannot_be_replaced_in_vain(
    act: Callable[[Any], None], told: str, size: int
) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make(world)
        with pytest.raises(UsageError, match=told):
            act(optimizer)
        step(optimizer, model)
        optimizer.close()

    run_ranks(size, rank)


class Factored(torch.optim.SGD):
    """Looks at an attribute of its own in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.factor = torch.ones(2)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.factor.prod())
        return super().step()


def make_factored(world: World, **settings: Any) -> tuple[Any, Factored, nn.Module]:
    """One that has taken a step, with a scheduler of the wrapped optimizer, which marks it."""
    model = nn.Linear(3, 2)
    fill(model)
    inner = Factored(model.parameters())
    optimizer = DistributedOptimizer(inner, model, world=world, **settings)
    torch.optim.lr_scheduler.StepLR(inner, 9)
    step(optimizer, model)
    return optimizer, inner, model


@GATHERS
def test_an_attribute_that_is_set_on_the_wrapped_optimizer_is_not_set_in_vain(gather: Any) -> None:
    """The copies that update the buckets would go on with the old one."""

    def rank(world: World) -> None:
        optimizer, inner, model = make_factored(world, gather=gather)
        step(optimizer, model)
        inner.factor = torch.zeros(2)
        with raises(UsageError, "optimizer-changed", "factor was set"):
            step(optimizer, model)

    run_ranks(2, rank)


@SIZES
def test_an_attribute_that_is_set_on_the_distributed_optimizer_is_not_set_in_vain(
    size: int,
) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make_factored(world)
        with raises(UsageError, "optimizer-changed", "factor was set"):
            optimizer.factor = torch.zeros(2)
        optimizer.note = "of the script"
        torch.optim.lr_scheduler.StepLR(optimizer, 9)
        step(optimizer, model)
        optimizer.close()

    run_ranks(size, rank)


def test_a_rank_alone_reads_attributes_of_the_wrapped_optimizer() -> None:
    def rank(world: World) -> None:
        optimizer, inner, model = make_factored(world)
        before = [param.detach().clone() for param in model.parameters()]
        inner.factor = torch.zeros(2)
        step(optimizer, model)
        assert all(map(torch.equal, before, model.parameters()))

    run_ranks(1, rank)


def scale(entries: dict[str, Any]) -> None:
    entries["exp_avg"] *= 2


def put_elsewhere(entries: dict[str, Any]) -> None:
    entries["exp_avg"].data = entries["exp_avg"] + 1


@GATHERS
@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries["exp_avg"].zero_(),
        lambda entries: entries["exp_avg"].data.zero_(),
        lambda entries: entries["exp_avg"].numpy().fill(3),
        lambda entries: entries["exp_avg"].detach()[0].mul_(2),
        lambda entries: entries.get("exp_avg").copy_(torch.ones(())),
        scale,
        put_elsewhere,
    ],
    ids=["in place", "data", "numpy", "part", "copy", "operator", "other data"],
)
def test_a_tensor_of_the_gathered_state_is_not_changed_in_vain(
    change: Callable[[Any], object], gather: Any
) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make(world, gather=gather)
        weight = model[0].weight
        assert optimizer.state[weight]["exp_avg"].abs().sum() > 0
        step(optimizer, model)  # who only reads may go on
        change(optimizer.state[weight])
        with raises(
            UsageError, "state-changed-in-place", r"0.weight]['exp_avg']", "load_state_dict"
        ):
            step(optimizer, model)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "act",
    [
        lambda state, param: state.pop(param),
        lambda state, param: state.update({param: {}}),
        lambda state, param: state.__setitem__(param, {}),
        lambda state, param: state.popitem(),
        lambda state, param: state.__delitem__(param),
        lambda state, param: state.__ior__({param: {}}),
        lambda state, param: state.pop(param, None),
        lambda state, param: state.setdefault(nn.Parameter(torch.ones(1)), {"step": 0}),
        lambda state, param: state[param].__setitem__("exp_avg", state[param]["exp_avg"] + 1),
        lambda state, param: state[param].__setitem__("more", 1),
        lambda state, param: state[param].update(exp_avg=None),
        lambda state, param: state[param].update({"more": 1}),
        lambda state, param: state[param].__ior__({"more": 1}),
        lambda state, param: state[param].setdefault("more", 1),
        lambda state, param: state[param].pop("step"),
        lambda state, param: state[param].popitem(),
        lambda state, param: state[param].__delitem__("step"),
        lambda state, param: state[param].clear(),
    ],
)
def test_whoever_changes_the_gathered_state_is_told_how_to(act: Callable[..., object]) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make(world)
        with pytest.raises(TypeError, match=r"state\[.*use optimizer.load_state_dict\(\)"):
            act(optimizer.state, model[0].weight)
        optimizer.close()

    run_ranks(2, rank)


def changed(entries: dict[str, Any]) -> dict[str, Any]:
    return {**entries, "exp_avg": entries["exp_avg"] + 1}


@SIZES
@GATHERS
def test_an_assignment_to_the_state_that_changes_nothing_is_accepted(
    gather: Any, size: int
) -> None:
    """As frameworks make one for each parameter that moves its state to the device where it is."""

    def rank(world: World) -> bool:
        optimizer, _, model = make(world, gather=gather)
        for param, entries in optimizer.state.items():
            optimizer.state[param] = entries
            optimizer.state[param] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
            for key, value in entries.items():
                entries[key] = value.to(value.device) if isinstance(value, Tensor) else value
                optimizer.state[param][key] = value
                assert optimizer.state[param].setdefault(key) is value
            entries.update(entries)
            entries |= dict(entries)
            assert optimizer.state.setdefault(param, {"step": 0}) == entries
            assert entries.pop("none of it", 3) == 3
            assert {type(copy.copy(entries)), type(deepcopy(entries))} == {dict}
        optimizer.state.update(optimizer.state)
        optimizer.state |= dict(optimizer.state)
        assert optimizer.state.pop(model[2].weight, None) is None
        optimizer.state = {param: dict(entries) for param, entries in optimizer.state.items()}
        before = deepcopy(optimizer.state_dict()["state"][0]["exp_avg"])
        step(optimizer, model)
        moved = not torch.equal(before, optimizer.state_dict()["state"][0]["exp_avg"])
        optimizer.close()
        return moved

    assert run_ranks(size, rank) == [True] * size


@GATHERS
@pytest.mark.parametrize(
    "change",
    [
        changed,
        lambda entries: {key: entries[key] for key in ("exp_avg", "exp_avg_sq")},
        lambda entries: {**entries, "more": 1},
        lambda entries: {**entries, "exp_avg": entries["exp_avg"].double()},
        lambda entries: {**entries, "exp_avg": entries["exp_avg"].to("meta")},
        lambda entries: {**entries, "step": float(entries["step"])},
    ],
    ids=["value", "less", "more", "dtype", "device", "kind"],
)
def test_an_assignment_to_the_state_that_changes_something_is_refused(
    change: Callable[[Any], Any], gather: Any
) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make(world, gather=gather)
        weight = model[0].weight
        with pytest.raises(TypeError, match=r"use optimizer.load_state_dict\(\)"):
            optimizer.state[weight] = change(optimizer.state[weight])
        whole = {param: dict(entries) for param, entries in optimizer.state.items()}
        with raises(UsageError, "optimizer-changed", "load_state_dict"):
            optimizer.state = {**whole, weight: change(whole[weight])}
        optimizer.close()

    run_ranks(2, rank)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Neither the state of any bucket nor what the learning rate is set in."""

    def rank(world: World) -> tuple[Any, Any]:
        optimizer, _, model = make(world, bucket_cap_mb=1e-6)
        before = optimizer.state_dict()
        bad = deepcopy(before)
        for entries in bad["state"].values():
            entries["exp_avg"] += 1
        bad["state"][0]["exp_avg"] = torch.zeros(2, 2)
        with raises(CheckpointError, "state-of-other-model", "exp_avg", "parameter 0.weight"):
            optimizer.load_state_dict(bad)
        kept = [entries["exp_avg"].tolist() for entries in before["state"].values()]
        found = [e["exp_avg"].tolist() for e in optimizer.state_dict()["state"].values()]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        weight = model[0].weight.detach().clone()
        step(optimizer, model)
        optimizer.synchronize()
        assert torch.equal(model[0].weight, weight)
        optimizer.close()
        return kept, found

    for kept, found in run_ranks(2, rank):
        assert kept == found


@SIZES
def test_hooks_around_state_dicts_are_called_as_torch_does(size: int) -> None:
    def script(optimizer: Any) -> tuple[list[str], float]:
        called: list[str] = []

        def count(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            called.append("saved")
            return {**state_dict, "epoch": 7}

        def halve(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            called.append(f"load epoch {state_dict.pop('epoch')}")
            (group,) = state_dict["param_groups"]
            return {**state_dict, "param_groups": [{**group, "lr": group["lr"] / 2}]}

        optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
        optimizer.register_state_dict_post_hook(count)
        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(
            lambda one: called.append(f"loaded {one.param_groups[0]['lr']}")
        )
        state_dict = optimizer.state_dict()
        optimizer.load_state_dict(state_dict)
        assert state_dict["epoch"] == 7
        return called, optimizer.param_groups[0]["lr"]

    def rank(world: World) -> Any:
        model = nn.Linear(3, 2)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        found = script(optimizer)
        optimizer.close()
        return found

    expected = script(torch.optim.Adam(nn.Linear(3, 2).parameters(), lr=0.1))
    assert run_ranks(size, rank) == [expected] * size


@SIZES
def test_what_changes_nothing_is_no_change(size: int) -> None:
    def rank(world: World) -> None:
        optimizer, _, model = make(world)
        optimizer.param_groups = optimizer.param_groups
        optimizer.state = optimizer.state
        for group in optimizer.param_groups:
            group["params"] = tuple(group["params"])
        step(optimizer, model)
        optimizer.close()

    run_ranks(size, rank)
