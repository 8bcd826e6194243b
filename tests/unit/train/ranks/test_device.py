"""Which device each rank trains on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import pytest
import torch

from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.ranks import device
from dearmpi.train.ranks import device as device_module
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.device import (
    CUBLAS_WORKSPACE,
    VISIBLE,
    DeviceChoice,
    VisibleGpus,
    allow_deterministic_only,
    choose_device,
    look_for_gpus,
)
from dearmpi.train.settings.choices import DeviceSetting
from tests.codes import raises


@dataclass
class Ranks:
    """The ranks of some hosts, each with the devices that it sees; one of them is asked.

    numbers: of the device that each rank takes; by default those of a host in turn.
    """

    counts: list[int]
    hosts: list[str]
    rank: int = 0
    numbers: list[str] | None = None

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def local_rank(self) -> int:
        return self.hosts[: self.rank].count(self.host)

    def number(self, rank: int) -> str:
        if self.numbers is not None:
            return self.numbers[rank]
        return str(self.hosts[:rank].count(self.hosts[rank]) % self.counts[rank])

    def all_gather_text(self, text: str, /) -> list[str]:
        if not text:  # nobody has failed
            return [""] * self.size
        own = json.loads(text)
        if isinstance(own, list):
            assert own == [self.host, self.number(self.rank)]
            return [json.dumps([host, self.number(i)]) for i, host in enumerate(self.hosts)]
        assert own["num_counted"] == self.counts[self.rank]
        views = [asdict(VisibleGpus(count, count, reason="no GPUs")) for count in self.counts]
        views[self.rank] = own
        return [json.dumps(view) for view in views]


def choose(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, asked: DeviceSetting = "auto"
) -> DeviceChoice:
    """With a torch that is built for CUDA, whatever this one is."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_module, "glob", lambda pattern: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ranks.counts[ranks.rank])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: ranks.counts[ranks.rank] > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    properties = SimpleNamespace(uuid=ranks.number(ranks.rank) if ranks.counts[ranks.rank] else "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return choose_device(ranks, asked)


def test_ranks_of_a_host_take_its_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["n0", "n0", "n0", "n1", "n1"]
    choices = [choose(monkeypatch, Ranks([2, 2, 2, 4, 4], hosts, rank)) for rank in range(5)]
    assert [choice.device.index for choice in choices] == [0, 1, 0, 0, 1]
    assert choices[0].reason == "H200, local rank 0 of 3, shared by 2 ranks"
    assert choices[1].reason == "H200, local rank 1 of 3"


def test_ranks_that_share_a_device_are_told_whatever_its_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher may show each rank a device of its own, which is then number 0 for each."""
    hosts = ["n0", "n0", "n1"]
    own = choose(monkeypatch, Ranks([1, 1, 1], hosts, numbers=["a", "b", "a"]))
    assert not own.warnings and "shared" not in own.reason
    for rank in range(2):
        shared = choose(monkeypatch, Ranks([1, 1, 1], hosts, rank, numbers=["a", "a", "b"]))
        (warning,) = shared.warnings
        assert warning.startswith("warning: ranks on n0: 2, devices they train on: 1")
        assert shared.reason.endswith("shared by 2 ranks")


def test_without_devices_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Ranks([0, 0], ["n0", "n0"])).device.type == "cpu"
    assert choose(monkeypatch, Ranks([1, 0], ["n0", "n1"]), "cpu").device.type == "cpu"
    with raises(AgreedError, "no-usable-device", "rank 0 on n0", VISIBLE) as failed:
        choose(monkeypatch, Ranks([0, 0], ["n0", "n0"]), "cuda")
    assert failed.value.exit_code == ConfigError.exit_code


def test_a_host_whose_gpus_lie_idle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    view = VisibleGpus(0, 0, 4, reason="torch is built without CUDA", cure="install another")
    monkeypatch.setattr("dearmpi.train.ranks.device.look_for_gpus", lambda: view)
    choice = choose(monkeypatch, Ranks([0, 0], ["n0", "n0"]))
    told = "rank 0 on n0 cannot use any of the 4 GPUs of its host (torch is built without CUDA)"
    assert choice.device.type == "cpu" and told in choice.reason


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_end_the_job_alike(
    asked: DeviceSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that sees none is not to blame, nor does auto leave GPUs idle that were asked for."""
    view = VisibleGpus(0, 4, 4, reason="the driver is too old", cure="install an older build")
    monkeypatch.setattr("dearmpi.train.ranks.device.look_for_gpus", lambda: view)
    told = ("rank 1 on n1", 4, view.reason, view.cure, "--device cpu")
    with raises(AgreedError, "no-usable-device", *told) as failed:
        choose(monkeypatch, Ranks([0, 4], ["n0", "n1"], rank=1, numbers=["", ""]), asked)
    assert failed.value.exit_code == ConfigError.exit_code


def test_a_device_that_cannot_be_taken_fails_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> str:
        raise RuntimeError("busy or unavailable")

    ranks = Ranks([1], ["n0"])
    monkeypatch.setattr(ranks, "all_gather_text", lambda text: [text])
    choose(monkeypatch, ranks)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with raises(AgreedError, "unforeseen-failure"):
        choose_device(ranks, "auto")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_ranks_with_and_without_a_device_are_named(
    asked: DeviceSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        with raises(MismatchError, "ranks-differ-in-devices", 1, "n1", 0, "n0", 2):
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


@pytest.fixture(autouse=True)
def _host_with_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "glob", lambda pattern: [f"gpu{i}" for i in range(4)])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("No CUDA GPUs are available"))


def fail(words: str) -> None:
    raise RuntimeError(words)


def test_all_that_torch_counts_can_be_used() -> None:
    assert look_for_gpus() == VisibleGpus(4, 4, 4)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    gpus = look_for_gpus()
    assert "any of the 4 GPUs of its host" in gpus.describe()
    assert "built without CUDA" in gpus.describe() and "build for CUDA" in gpus.cure
    assert not gpus.is_broken


def test_a_driver_that_is_too_old_for_torch_is_told_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch counts devices by a library that needs no CUDA, and so counts what it cannot use."""

    words = "The NVIDIA driver on your system is too old (found version 12020).\nx"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(words))
    gpus = look_for_gpus()
    assert gpus.is_broken and gpus.num_usable == 0
    assert gpus.describe().endswith("too old (found version 12020).)")
    assert "that the driver there can run" in gpus.cure


def test_a_driver_that_only_cuda_can_be_asked_about_is_told_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NVML fails torch asks CUDA, which counts none that it cannot use."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("Error 803: unsupported driver"))
    gpus = look_for_gpus()
    assert gpus.describe().endswith("Error 803: unsupported driver)")
    assert "driver there can run" in gpus.cure and "--gpus-per-node" in gpus.cure
    monkeypatch.setenv(VISIBLE, "")  # they were hidden, so that of the driver nothing is known
    assert look_for_gpus().describe().endswith(f"({VISIBLE} is '')")


@pytest.mark.parametrize(
    ("value", "told"), [(None, f"{VISIBLE} is not set"), ("", f"{VISIBLE} is ''")]
)
def test_gpus_that_a_job_was_not_given_are_told_with_how_to_ask(
    value: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(VISIBLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    gpus = look_for_gpus()
    assert told in gpus.describe() and "--gpus-per-node" in gpus.cure
