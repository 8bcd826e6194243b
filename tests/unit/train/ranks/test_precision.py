"""In which numbers the model computes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train.data.data import Batches
from dearmpi.train.ranks.device import check_precision, computing, convert_batch, convert_model
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.unit.train.points import SGD, Points, make_job, make_task, train


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


def test_fp64_converts_floating_point_in_any_container_and_leaves_labels() -> None:
    batch = {"pair": Pair(torch.zeros(2), torch.ones(2, dtype=torch.long)), "list": [torch.ones(1)]}
    converted = convert_batch(batch, "fp64")
    assert isinstance(converted["pair"], Pair)
    assert converted["pair"].inputs.dtype == torch.float64
    assert converted["pair"].labels.dtype == torch.long
    assert converted["list"][0].dtype == torch.float64


def test_a_mapping_that_is_no_dict_is_converted_and_stays_what_it_is() -> None:
    batch = UserDict({"inputs": torch.zeros(2)})
    converted = convert_batch(batch, "fp64")
    assert isinstance(converted, UserDict)
    assert converted["inputs"].dtype == torch.float64
    assert batch["inputs"].dtype == torch.float32


class Kept(MutableMapping[str, Tensor]):
    """Of which a copy holds the same items."""

    def __init__(self) -> None:
        self.items_of = {"inputs": torch.zeros(2)}

    def __getitem__(self, name: str) -> Tensor:
        return self.items_of[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.items_of[name] = value

    def __delitem__(self, name: str) -> None:
        del self.items_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def test_a_batch_that_a_data_set_keeps_stays_as_it_is() -> None:
    batch = Kept()
    assert convert_batch(batch, "fp64")["inputs"].dtype == torch.float64
    assert batch["inputs"].dtype == torch.float32


def test_bf16_computes_in_bf16_over_fp32_parameters() -> None:
    model = nn.Linear(2, 2)
    convert_model(model, "bf16")
    with computing(torch.device("cpu"), "bf16"):
        output = model(torch.ones(1, 2))
    assert (model.weight.dtype, output.dtype) == (torch.float32, torch.bfloat16)


def test_a_run_in_bf16_trains_and_evaluates_in_bf16(alone: World, tmp_path: Path) -> None:
    seen: set[tuple[bool, torch.dtype]] = set()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        output = model(inputs)
        seen.add((model.training, output.dtype))
        return nn.functional.mse_loss(output.float(), targets)

    settings = RunSettings(max_steps=1, precision="bf16", **SGD)
    train(make_job(alone, settings, make_task(loss)), tmp_path)
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}


def test_a_run_in_fp16_scales_its_loss_and_skips_a_step_that_overflows(
    alone: World, tmp_path: Path
) -> None:
    """As torch's loop with its scaler does, to the last bit."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return 4 * nn.functional.mse_loss(model(inputs).float(), targets)

    settings = RunSettings(max_steps=6, precision="fp16", **(SGD | {"lr": 1e-3}))
    seed_all(settings.seed)
    model = make_task().model
    job = make_job(alone, settings, make_task(loss))
    job.task.model.load_state_dict(model.state_dict())
    outcome, _ = train(job, tmp_path)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    num_skipped = 0
    assert isinstance(job.batches, Batches)
    for step in range(6):
        indices = list(job.batches.step(*job.position(step))[0].indices)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            error = loss(model, (Points(20).inputs[indices], Points(20).targets[indices]))
        torch.autograd.backward(scaler.scale(error))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
    assert 0 < outcome.num_skipped == num_skipped < 6
    for ours, theirs in zip(job.task.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_device_that_cannot_compute_in_a_precision_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def linear(*_: object) -> Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    check_precision(torch.device("cpu"), "fp16")
    monkeypatch.setattr(nn.functional, "linear", linear)
    check_precision(torch.device("cpu"), "fp32")
    with raises(ConfigError, "precision-unsupported", "fp16", "addmm_impl_cpu_"):
        check_precision(torch.device("cpu"), "fp16")


def test_fp32_changes_nothing() -> None:
    model, batch = nn.Linear(2, 2), (torch.ones(1, 2),)
    convert_model(model, "fp32")
    assert convert_batch(batch, "fp32") is batch
    with computing(torch.device("cpu"), "fp32"):
        assert model(*batch).dtype == torch.float32
