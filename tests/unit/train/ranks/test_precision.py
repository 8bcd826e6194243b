"""In which numbers the model computes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.train.ranks.device import computing, convert_batch, convert_model
from dearmpi.train.settings.settings import RunSettings
from tests.unit.train.points import SGD, make_job, make_task, train


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


def test_fp32_changes_nothing() -> None:
    model, batch = nn.Linear(2, 2), (torch.ones(1, 2),)
    convert_model(model, "fp32")
    assert convert_batch(batch, "fp32") is batch
    with computing(torch.device("cpu"), "fp32"):
        assert model(*batch).dtype == torch.float32
