"""Half precision on the wire: what is kept, what is saved, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig, GradScaler
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import CheckpointError, ConfigError, WireRangeError
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies
from tests.unit.engine.parts import distribute, make_model, masters_of, resume, train

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BEYOND = 80000.0  # what fp16 holds; half of it is not


@turns_of(gather=["parameters", "gradients"], inner=["adam", "plain", "sgd"])
def test_a_resumed_run_goes_on_bit_by_bit(gather: Gather, inner: str) -> None:
    """Also where there is no other state, and where parameters got their first gradient late."""
    settings: dict[str, Any] = {"comm_dtype": "bf16", "gather": gather, "inner": inner}
    whole = run_ranks(3, resume(range(7), **settings))
    for middle in (2, 5):
        start = run_ranks(3, resume(range(middle), **settings))[0][0]
        parts = run_ranks(3, resume(range(middle, 7), start, **settings))
        assert {digest for _, digest in parts} == {digest for _, digest in whole}


@pytest.mark.parametrize(
    ("size", "comm_dtype"), [(2, "fp32"), (2, "fp16"), (4, "bf16"), (1, "bf16")]
)
def test_no_digit_is_lost_at_another_world_size_or_dtype(size: int, comm_dtype: str) -> None:
    start = run_ranks(3, resume(range(4), comm_dtype="bf16"))[0][0]
    exact = masters_of(start)
    for seen, master in zip(start[0].values(), exact, strict=True):
        assert torch.equal(seen, master.bfloat16().float())
        assert not torch.equal(seen, master)
    (found, _), *_ = run_ranks(size, resume(range(0), start, comm_dtype=comm_dtype))
    if size == 1 or comm_dtype == "fp32":
        assert all(map(torch.equal, found[0].values(), exact))
        assert not any("master" in entries for entries in found[1]["state"].values())
    else:
        assert all(map(torch.equal, masters_of(found), exact))
        for seen, master in zip(found[0].values(), exact, strict=True):
            assert torch.equal(seen, master.to(HALVES[comm_dtype]).float())


def test_masters_outlive_a_new_layout() -> None:
    def rank(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make_model()
        optimizer = distribute(model, world, comm_dtype="bf16")
        train(model, optimizer, range(4), world)
        before = masters_of(({}, optimizer.state_dict()))
        optimizer.fuse(1.0)
        after = masters_of(({}, optimizer.state_dict()))
        optimizer.close()
        return before, after

    for before, after in run_ranks(2, rank):
        assert all(map(torch.equal, before, after))


def test_parameters_that_a_script_changes_count_more_than_masters() -> None:
    def rank(world: World) -> dict[str, Tensor]:
        model = make_model()
        optimizer = distribute(model, world, comm_dtype="bf16", inner="plain")
        train(model, optimizer, range(4), world)
        optimizer.synchronize()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3.0)
        for param in model.parameters():
            param.grad = None
        optimizer.zero_grad()
        (0.0 * sum(param.sum() for param in model.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()
        return copies(model)

    for found in run_ranks(2, rank):
        assert all(bool((value == 3.0).all()) for value in found.values())


def test_only_half_of_the_bytes_travel() -> None:
    nbytes: dict[str, set[int]] = {"fp32": set(), "bf16": set()}
    for comm_dtype, seen in nbytes.items():

        def seconds(label: str, sent: int, seen: set[int] = seen) -> float:
            if label[:2] in ("RS", "AG"):
                seen.add(sent)
            return 0.0

        run_ranks(
            2,
            resume(range(4), comm_dtype=comm_dtype, bucket_cap_mb=1.0),
            hub=FakeHub(2, seconds=seconds),
        )
    assert {sent / 2 for sent in nbytes["fp32"]} == nbytes["bf16"]


def test_a_rank_keeps_masters_of_its_own_shard_only() -> None:
    def count(world: World) -> tuple[int, int]:
        model = make_model()
        optimizer = distribute(model, world, comm_dtype="bf16", bucket_cap_mb=1.0)
        runs = [run for update in optimizer._built.updates.of_buckets for run in update.runs]  # type: ignore[union-attr]
        held = sum(run.master.values.numel() for run in runs if run.master is not None)
        optimizer.close()
        return held, sum(param.numel() for param in model.parameters())

    found = run_ranks(4, count)
    assert sum(held for held, _ in found) == found[0][1]
    assert max(held for held, _ in found) <= found[0][1] / 4 + 4


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_gradient_beyond_fp16_ends_the_run_and_names_its_bucket(gather: Gather) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = distribute(model, world, comm_dtype="fp16", gather=gather)
        (BEYOND * model.weight.sum()).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(WireRangeError, match="rank . on .*bucket 0 .weight.*65504") as caught:
        run_ranks(2, rank)
    assert caught.value.exit_code == 7
    assert "bf16" in str(caught.value) and "GradScaler" in str(caught.value)


def test_a_gradient_scaler_leaves_out_a_step_whose_sum_is_beyond_fp16() -> None:
    def rank(world: World) -> tuple[list[float], float]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = distribute(model, world, comm_dtype="fp16", inner="plain")
        scaler = GradScaler("cpu", init_scale=BEYOND, growth_interval=100)
        values = []
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model.weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            values.append(model.weight.detach()[0, 0].item())
        optimizer.close()
        return values, scaler.get_scale()

    for values, scale in run_ranks(2, rank):
        assert values == [0.0, pytest.approx(-0.05, rel=1e-3)]
        assert scale == BEYOND / 2


def test_a_parameter_beyond_fp16_ends_the_run() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, 65500.0)
        optimizer = distribute(model, world, comm_dtype="fp16", inner="plain")
        (-1000 * model.weight.sum()).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(WireRangeError, match="parameters of bucket 0 .weight. have come to 65550"):
        run_ranks(2, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused_on_one_rank_already(size: int) -> None:
    def rank(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            distribute(make_model().bfloat16(), world, comm_dtype="bf16")
        return str(caught.value)

    assert all("comm_dtype 'bf16' has no effect" in message for message in run_ranks(size, rank))


def test_one_rank_rounds_nothing() -> None:
    exact, rounded = (
        run_ranks(1, resume(range(5), comm_dtype=comm_dtype))[0][1]
        for comm_dtype in ("fp32", "bf16")
    )
    assert exact == rounded


def test_mpi_cannot_add_half_precision() -> None:
    with raises(ConfigError, "settings-contradict", "'native'", "'ring'", "'exchange'"):
        EngineConfig(comm_dtype="bf16", reduce_scatter="native")


def test_a_master_copy_of_another_model_is_refused() -> None:
    start = run_ranks(2, resume(range(4), comm_dtype="bf16"))[0][0]
    start[1]["state"][0]["master"] = torch.zeros(2)

    def rank(world: World) -> str:
        optimizer = distribute(make_model(), world, comm_dtype="bf16")
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(start[1])
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "master copy of parameter" in message and "(2,)" in message


class SingleOnly(torch.optim.SGD):
    """Refuses anything but fp32."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.dtype != torch.float32:
                    raise TypeError(f"no kernel for {param.dtype}")
        return super().step(closure)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_an_optimizer_that_needs_single_precision_is_given_it_or_refused(gather: Gather) -> None:
    def rank(world: World) -> str:
        model = make_model()
        inner = SingleOnly(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, model, world=world, comm_dtype="bf16", gather=gather
        )
        train(model, optimizer, range(3, 5), world)
        optimizer.close()
        half = make_model().bfloat16()
        with pytest.raises(ConfigError) as caught:
            DistributedOptimizer(
                SingleOnly(half.parameters(), lr=0.1), half, world=world, gather=gather
            )
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "SingleOnly cannot update parameters of torch.bfloat16" in message
        assert "no kernel for" in message and "master_weights=True" in message
