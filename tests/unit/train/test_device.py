"""Which device each rank trains on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import pytest
import torch

from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.agreement import AgreedError
from dearmpi.train.choices import DeviceSetting
from dearmpi.train.device import (
    CUBLAS_WORKSPACE,
    VISIBLE,
    DeviceChoice,
    allow_deterministic_only,
    choose_device,
)


@dataclass
class Ranks:
    """The ranks of some hosts, each with the devices that it sees; one of them is asked."""

    counts: list[int]
    hosts: list[str]
    rank: int = 0

    @property
    def local_rank(self) -> int:
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    def all_gather_text(self, text: str, /) -> list[str]:
        assert json.loads(text)[0] == self.counts[self.rank]
        return [json.dumps([count, None]) for count in self.counts]


def choose(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, asked: DeviceSetting = "auto"
) -> DeviceChoice:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ranks.counts[ranks.rank])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return choose_device(ranks, asked)


def test_ranks_of_a_host_take_its_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["n0", "n0", "n0", "n1", "n1"]
    choices = [choose(monkeypatch, Ranks([2, 2, 2, 4, 4], hosts, rank)) for rank in range(5)]
    assert [choice.device.index for choice in choices] == [0, 1, 0, 0, 1]
    assert choices[0].reason == "H200, local rank 0 of 3, shared by 2 ranks"
    assert choices[1].reason == "H200, local rank 1 of 3"


def test_without_devices_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Ranks([0, 0], ["n0", "n0"])).device.type == "cpu"
    assert choose(monkeypatch, Ranks([1, 0], ["n0", "n1"]), "cpu").device.type == "cpu"
    told = f"rank 0 on n0 sees no CUDA device .*{VISIBLE} is not"
    with pytest.raises(AgreedError, match=told) as failed:
        choose(monkeypatch, Ranks([0, 0], ["n0", "n0"]), "cuda")
    assert failed.value.exit_code == ConfigError.exit_code


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_ranks_with_and_without_a_device_are_named(
    asked: DeviceSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        with pytest.raises(MismatchError, match="rank 1 on n1 sees no .* rank 0 on n0 sees 2"):
            choose(monkeypatch, Ranks([2, 0], ["n0", "n1"], rank), asked)


@pytest.mark.parametrize(("chosen", "found"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_deterministic_operators_come_with_the_workspaces_that_cublas_asks_for(
    chosen: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them torch refuses every matrix product on a device."""
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setenv(CUBLAS_WORKSPACE, chosen or "")
    if chosen is None:
        monkeypatch.delenv(CUBLAS_WORKSPACE)
    allow_deterministic_only(False)
    assert os.environ.get(CUBLAS_WORKSPACE) == chosen
    allow_deterministic_only(True)
    assert os.environ[CUBLAS_WORKSPACE] == found and asked == [False, True]
