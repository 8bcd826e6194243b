"""What goes wrong is said where the user is, with rank, host and bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather, ProgressMode
from dearmpi.errors import CommError, ConfigError, MismatchError, UsageError
from tests.codes import raises
from tests.fakes import Action, FakeHub, Fault
from tests.fakes.ranks import run_ranks
from tests.mpi.models import Matrices, fill
from tests.mpi.oracle import OPTIMIZERS
from tests.unit.engine.chain import Chain, name_of_bucket

NUM_LAYERS = 3

NEXT_CALLS: dict[str, Callable[[Chain, DistributedOptimizer], object]] = {
    "feed-forward": lambda model, optimizer: model(torch.ones(1, 4)),
    "backprop": lambda model, optimizer: model.backward(),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "close": lambda model, optimizer: optimizer.close(),
}


def fail(
    fault: Fault,
    next_call: Callable[[Chain, DistributedOptimizer], object],
    progress: ProgressMode = "thread",
    **settings: Any,
) -> CommError:
    """What rank ``fault.rank`` is told by its next call after a step."""
    hub = FakeHub(2, name=name_of_bucket(2, NUM_LAYERS), faults=[fault], hosts=["n0", "n1"])

    def rank(world: World) -> CommError | None:
        model = Chain(NUM_LAYERS)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            bucket_cap_mb=1e-6,
            **settings,
        )
        try:
            model.backward()
            optimizer.step()
            next_call(model, optimizer)
        except CommError as error:
            hub.fail("a rank has failed")
            return error
        return None

    error = run_ranks(2, rank, hub=hub, progress=progress)[fault.rank]
    assert error is not None, "the failure was told to nobody"
    return error


@pytest.mark.parametrize("next_call", NEXT_CALLS)
@pytest.mark.parametrize("label", ["RS1", "AG0"])
def test_a_failed_operation_is_told_by_the_next_call(label: str, next_call: str) -> None:
    message = str(fail(Fault(1, "break", label=label), NEXT_CALLS[next_call]))
    assert "rank 1 on n1" in message and label in message and "broke" in message


@pytest.mark.parametrize("action", ["break", "refuse"])
@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
@pytest.mark.parametrize("progress", ["thread", "poll"])
def test_whatever_fails_and_whoever_makes_progress(
    progress: ProgressMode, schedule: str, action: Action
) -> None:
    for label in ("RS2", "AG2"):
        fault = Fault(0, action, label=label)
        error = fail(fault, NEXT_CALLS["synchronize"], progress, schedule=schedule)
        assert "rank 0 on n0" in str(error) and label in str(error)


def test_a_failed_update_is_told_with_its_bucket() -> None:
    class Failing(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if Failing.broken:
                raise ZeroDivisionError("no rate today")
            return super().step(closure)

    def rank(world: World) -> None:
        model = Chain(NUM_LAYERS)
        inner = Failing(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
        world.barrier()
        Failing.broken = True
        model.backward()
        raised = "the optimizer's step raised ZeroDivisionError: no rate today"
        with raises(CommError, "optimizer-step-failed", "update of bucket", raised) as caught:
            optimizer.step()  # ends before the update begins, or learns that it has failed
            optimizer.synchronize()
        assert caught.value.exit_code == 1  # of the user's code, and not of communication

    run_ranks(2, rank)


def mismatch(make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> list[str]:
    """What each of three ranks is told, made by ``make(rank)``."""

    def rank(world: World) -> str:
        model, settings = make(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(optimizer, model, world=world, **settings)
        return str(caught.value)

    return run_ranks(3, rank)


def test_another_setting_on_one_rank_is_named_on_all_with_both_values() -> None:
    messages = mismatch(lambda rank: (Chain(2), {"window": 3 if rank == 2 else 1}))
    assert len(set(messages)) == 1
    assert "rank 2 on fakehost has another setting than rank 0 on fakehost: " in messages[0]
    assert "its optimizer has window=3 where rank 0's has window=1;" in messages[0]


def test_another_model_on_one_rank_is_named_on_all() -> None:
    def make(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        return nn.Linear(4, 5 if rank == 1 else 3), {}

    messages = mismatch(make)
    assert len(set(messages)) == 1
    assert "rank 1 on fakehost has another model than rank 0 on fakehost: " in messages[0]
    assert (
        "its optimizer has weight of shape (5, 4) (float32 on cpu) where rank 0's has weight of "
        "shape (3, 4) (float32 on cpu);" in messages[0]
    )


def test_of_a_model_that_ends_sooner_the_first_parameter_that_is_missing_is_named() -> None:
    messages = mismatch(lambda rank: (nn.Linear(4, 3, bias=rank != 2), {}))
    assert len(set(messages)) == 1
    assert "rank 2" in messages[0] and "nothing further" in messages[0]
    assert "rank 0's has bias of shape (3,)" in messages[0]


def test_another_optimizer_on_one_rank_is_named_on_all() -> None:
    def rank(world: World) -> str:
        model = Chain(2)
        build = torch.optim.Adam if world.is_root else torch.optim.AdamW
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(build(model.parameters()), model, world=world)
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "rank 1 on fakehost has another optimizer than rank 0 on fakehost" in message
        assert "the type AdamW where rank 0's has the type Adam;" in message


def test_of_many_parameters_in_another_group_the_first_is_named() -> None:
    """All in a line would be cut, and leave two hashes to look at."""

    def rank(world: World) -> str:
        model = Chain(40)
        params = list(model.parameters())
        count = 33 if world.rank == 2 else 32
        groups = [{"params": params[:count]}, {"params": params[count:]}]
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model, world=world)
        return str(caught.value)

    (message, *others) = run_ranks(3, rank)
    assert others == [message] * 2
    name = list(dict(Chain(40).named_parameters()))[32]
    assert f"its optimizer has {name} in param group 0 where rank 0's has {name} in" in message


def test_ranks_that_are_alike_tell_each_other_hashes_alone() -> None:
    """Of hundreds of ranks each would have to keep what all have told."""

    def rank(world: World) -> int:
        told: list[str] = []
        gather = world.all_gather_text
        world.all_gather_text = lambda text: (told.append(text), gather(text))[1]  # type: ignore
        model = Chain(40)
        DistributedOptimizer(torch.optim.Adam(model.parameters()), model, world=world).close()
        return max(map(len, told))

    assert max(run_ranks(2, rank)) < 150


def refused(
    build: Callable[[Any], torch.optim.Optimizer], model: nn.Module | None = None, **settings: Any
) -> str:
    """Why ranks refuse an optimizer."""

    def rank(world: World) -> str:
        own = model if model is not None else Matrices()
        with pytest.raises(ConfigError) as caught:
            DistributedOptimizer(build(own.parameters()), own, world=world, **settings)
        return str(caught.value)

    messages = run_ranks(2, rank)
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
def test_parameters_whose_gradients_cannot_be_added_are_refused_by_name(dtype: torch.dtype) -> None:
    model: Any = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.ones(3).to(dtype))
    for gather in ("parameters", "gradients"):
        message = refused(lambda params: torch.optim.SGD(params, lr=0.1), model, gather=gather)
        assert f"parameter scale is of {dtype}, whose gradients cannot be added up" in message


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_whole_tensors_are_refused_by_gather_parameters(name: str) -> None:
    message = refused(OPTIMIZERS[name], gather="parameters", shards="even")
    assert "gather='gradients'" in message


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("build", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_run_bucket_by_bucket_are_refused(
    build: Any, gather: Gather
) -> None:
    message = refused(build, gather=gather)
    assert build.__name__ in message


class Hybrid(torch.optim.SGD):
    """Treats a group's matrices as wholes if the group says so, as optimizers with Muon do."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if group["whole"] and param.grad is not None:
                        param.grad.div_(param.grad.norm())
        return super().step(closure)


@pytest.mark.parametrize("first", [False, True])
def test_an_optimizer_that_needs_whole_tensors_in_one_group_only_is_refused(first: bool) -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        one, other = params
        groups = [{"params": [one], "whole": first}, {"params": [other], "whole": not first}]
        return Hybrid(groups, lr=0.1)

    assert "gather='gradients'" in refused(build, gather="parameters", shards="even")


def test_settings_that_do_not_exist_are_refused_with_those_that_do() -> None:
    message = refused(lambda params: torch.optim.SGD(params), bucket_cap=3)
    assert "bucket_cap" in message and "bucket_cap_mb" in message


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = Chain(2)
    message = refused(lambda params: torch.optim.SGD(other.parameters()))
    assert "not in the model" in message


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = Matrices().requires_grad_(False)
    assert "nothing to train" in refused(lambda params: torch.optim.SGD(params), model=model)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_parameters_moved_out_of_their_storage_are_noticed(gather: Gather) -> None:
    def rank(world: World) -> str:
        model = Chain(2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters()),
            model,
            world=world,
            gather=gather,
            bucket_cap_mb=1e-6,
        )
        model.backward()
        optimizer.step()
        model.layers[1].double().float()
        with pytest.raises(UsageError) as caught:
            model.backward()
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "layers.1.weight has moved" in message


def test_a_parameter_with_new_data_is_refused_with_the_way_to_change_values() -> None:
    def rank(world: World) -> None:
        model = Chain(2)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), model, world=world)
        weight = model.get_parameter("layers.1.weight")
        weight.data.copy_(weight.data / weight.data.norm())
        model.backward()
        optimizer.step()
        weight.data = weight.data / weight.data.norm()
        with raises(UsageError, "params-moved", "param.data.copy_"):
            model.backward()

    run_ranks(2, rank)


def test_a_step_of_the_wrapped_optimizer_is_refused_with_whose_to_call() -> None:
    def rank(world: World) -> None:
        model = Chain(2)
        wrapped = torch.optim.SGD(model.parameters())
        optimizer = DistributedOptimizer(wrapped, model, world=world)
        model.backward()
        with raises(UsageError, "gradient-in-reduction", "DistributedOptimizer"):
            wrapped.step()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


def test_a_sparse_gradient_is_refused_with_its_name() -> None:
    def rank(world: World) -> str:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        fill(model)
        DistributedOptimizer(torch.optim.SGD(model.parameters()), model, world=world)
        with pytest.raises(UsageError) as caught:
            model(torch.tensor([1, 3])).sum().backward()
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "0.weight is sparse" in message and "sparse=False" in message
