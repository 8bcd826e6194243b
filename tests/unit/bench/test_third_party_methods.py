"""Horovod and DeepSpeed as methods, with stand-ins for the packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from dearmpi.bench.comparison import Length, compare_methods
from dearmpi.bench.method import Setup
from dearmpi.bench.method_names import read_method
from dearmpi.bench.result import Result, Row
from dearmpi.bench.third_party_methods import deepspeed_config, environment, find_on_all, horovod
from dearmpi.bench.workload_model import ReplayedModel
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload

THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
OUR_VARIABLES = ("HOROVOD", "DS_ACCELERATOR", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(OUR_VARIABLES):
            monkeypatch.delenv(name)


class FakeHorovod(ModuleType):
    """Horovod on one rank: what it was told, in ``said``."""

    Compression = SimpleNamespace(none="none", fp16="fp16")

    def __init__(self, *, size: int = 1, threads: bool = True, mpi: bool = True) -> None:
        super().__init__("horovod.torch")
        self.said: list[Any] = []
        self.thresholds: list[str] = []
        self.is_running = False
        self.size, self.mpi_built = lambda: size, lambda: mpi
        self.mpi_threads_supported = lambda: threads

    def init(self) -> None:
        assert not self.is_running
        self.is_running = True
        self.thresholds.append(os.environ[THRESHOLD])
        assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "60"

    def shutdown(self) -> None:
        self.is_running = False

    def broadcast_parameters(self, params: dict[str, Tensor], root_rank: int) -> None:
        self.said.append(("broadcast", root_rank, len(params)))

    def DistributedOptimizer(self, optimizer: Any, named_parameters: Any, compression: str) -> Any:
        self.said.append(("wrap", dict(named_parameters).keys(), compression))
        return optimizer


class FakeEngine(nn.Module):
    """DeepSpeed's engine on one rank; it clears the gradients itself."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module, self.optimizer = model, optimizer
        self.is_destroyed = False

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.module(inputs)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def destroy(self) -> None:
        self.is_destroyed = True


class FakeDeepSpeed(ModuleType):
    """DeepSpeed on one rank: the engines that it made, and their configurations."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.engines: list[FakeEngine] = []
        self.configs: list[dict[str, Any]] = []
        self.num_forgotten = 0
        self.comm = SimpleNamespace(destroy_process_group=self._forget)
        self.ops = SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True})
        self.utils = SimpleNamespace(groups=SimpleNamespace(_WORLD_GROUP=None))

    def initialize(
        self, model: nn.Module, optimizer: Any, config: Any, dist_init_required: bool
    ) -> tuple[FakeEngine, None, None, None]:
        assert dist.is_initialized() and not dist_init_required
        assert (os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"]) == ("cpu", "0")
        assert not self.ops.__compatible_ops__["deepspeed_shm_comm"]  # it would be compiled now
        dist.barrier(self.utils.groups._WORLD_GROUP)  # refused for a group of an earlier block
        self.engines.append(FakeEngine(model, optimizer))
        self.configs.append(config)
        return self.engines[-1], None, None, None

    def _forget(self) -> None:
        self.num_forgotten += 1
        dist.destroy_process_group()
        self.utils.groups._WORLD_GROUP = None


def install(monkeypatch: pytest.MonkeyPatch, package: ModuleType) -> None:
    top = package.__name__.partition(".")[0]
    monkeypatch.setitem(sys.modules, top, package if top == package.__name__ else ModuleType(top))
    monkeypatch.setitem(sys.modules, package.__name__, package)


def contest(world: World, *names: str, num_rounds: int = 1) -> Result:
    subject = ReplayedModel(
        profile_workload(read_workload("equal:0.01:2"), feed_forward_s=0.001, backprop_s=0.002),
        batch_size=8,
        rank=world.rank,
        world_size=world.size,
    )
    length = Length(num_warmup=1, num_batches=2, num_rounds=num_rounds)
    methods = [read_method(name) for name in names]
    return compare_methods(world, subject, methods, length=length, tell=lambda line: None)


def check_measured(row: Row, num_rounds: int) -> None:
    assert not row.error and len(row.blocks) == num_rounds


def test_horovod_starts_anew_for_each_block(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = FakeHorovod()
    install(monkeypatch, hvd)
    result = contest(alone, "horovod", "horovod:0.5:comm_dtype=fp16", "dear", num_rounds=2)
    for row in result.rows:
        check_measured(row, 2)
    # The second round goes the other way: a cap must not stay for those that give none.
    assert hvd.thresholds == ["134217728", "524288", "524288", "134217728"]
    assert [said[2] for said in hvd.said if said[0] == "wrap"] == ["none", "fp16", "fp16", "none"]
    assert hvd.said[0] == ("broadcast", 0, 2)
    assert hvd.said[1][1] == {"layer0.weight", "layer1.weight"}
    assert not hvd.is_running
    assert not any(name.startswith(OUR_VARIABLES) for name in os.environ)


def test_a_threshold_of_the_user_holds_where_no_cap_is_given(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvd = FakeHorovod()
    install(monkeypatch, hvd)
    monkeypatch.setenv(THRESHOLD, "1000")
    contest(alone, "horovod", "horovod:0")
    assert hvd.thresholds == ["1000", "0"]
    assert os.environ[THRESHOLD] == "1000"


@pytest.mark.parametrize(
    ("hvd", "words"),
    [
        (FakeHorovod(size=4), ("RuntimeError", "4 rank", "has 1", "another MPI")),
        (FakeHorovod(threads=False), ("RuntimeError", "MPI_THREAD_MULTIPLE")),
        (FakeHorovod(mpi=False), ("ImportError", "without MPI", "HOROVOD_WITH_MPI=1")),
        (ModuleType("horovod.torch"), ("ImportError", "without torch")),
    ],
    ids=["other MPI", "threads", "no MPI", "no torch"],
)
def test_a_horovod_that_does_not_fit_is_out(
    alone: World, monkeypatch: pytest.MonkeyPatch, hvd: Any, words: tuple[str, ...]
) -> None:
    install(monkeypatch, hvd)
    bad, good = contest(alone, "horovod", "dear").rows
    assert all(word in bad.error for word in words), bad.error
    assert not getattr(hvd, "is_running", False)
    check_measured(good, 1)


def test_deepspeed_leaves_no_group_behind(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakeDeepSpeed()
    install(monkeypatch, package)
    result = contest(alone, "deepspeed:stage=2", "ddp", "deepspeed", num_rounds=2)
    for row in result.rows:
        check_measured(row, 2)
    stages = [config["zero_optimization"]["stage"] for config in package.configs]
    assert stages == [2, 1, 1, 2]
    assert all(engine.is_destroyed for engine in package.engines)
    assert package.num_forgotten == 4 and not dist.is_initialized()
    assert not any(name.startswith(OUR_VARIABLES) for name in os.environ)


def test_deepspeed_goes_on_after_a_block_of_its_own_failed(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeEngine, loss: Tensor) -> None:
        monkeypatch.setattr(FakeEngine, "backward", backward)
        raise OSError("broken")

    backward = FakeEngine.backward
    install(monkeypatch, FakeDeepSpeed())
    monkeypatch.setattr(FakeEngine, "backward", fail)
    bad, good = contest(alone, "deepspeed", "deepspeed:stage=2").rows
    assert "OSError: broken" in bad.error
    check_measured(good, 1)


def test_deepspeed_is_told_the_options() -> None:
    plain = deepspeed_config({})
    assert plain["zero_optimization"] == {"stage": 1}
    assert plain["communication_data_type"] == "fp32"
    assert plain["gradient_clipping"] == 0  # it clips unless told not to
    config = deepspeed_config({"stage": "2", "cap": "4", "comm_dtype": "bf16"})
    in_elements = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}
    assert config["zero_optimization"] == {"stage": 2, **in_elements}
    assert config["communication_data_type"] == "bf16"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("horovod:stage=1", "no option stage; it has cap, comm_dtype"),
        ("horovod:comm_dtype=bf16", "Horovod compresses to fp16"),
        ("horovod:many", "many"),
        ("horovod:-1", "0 or more"),
        ("deepspeed:window=2", "window"),
        ("deepspeed:stage=3", "0, 1, 2"),
        ("deepspeed:4:stage=0", "no bucket cap"),
        ("deepspeed:inf", "0 or more"),
        ("deepspeed:comm_dtype=fp8", "fp8"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_method(name)


def test_horovod_cannot_be_asked_for_bf16_with_all_others() -> None:
    assert read_method("horovod", comm_dtype="fp16").options == {"comm_dtype": "fp16"}
    with pytest.raises(ConfigError, match="horovod is not measured as bf16 here"):
        read_method("horovod", comm_dtype="bf16")


def a_world(*problems: str) -> Any:
    """Rank 0 of a world whose other ranks say ``problems``."""
    return SimpleNamespace(size=1 + len(problems), all_gather_text=lambda own: [own, *problems])


def test_no_rank_waits_for_one_that_lacks_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = FakeHorovod()
    install(monkeypatch, hvd)
    world = a_world("", "No module named 'horovod'")
    setup = Setup(world, nn.Linear(1, 1), lambda params: pytest.fail("entered"))
    with pytest.raises(ImportError, match=r"on 1 of 3 ranks \(rank 2: No module named 'horovod'\)"):
        horovod(setup)
    assert not hvd.thresholds


@pytest.mark.parametrize(
    ("failure", "told"),
    [(OSError("undefined symbol\nin a library"), "undefined symbol"), (OSError(), "OSError")],
)
def test_a_package_that_breaks_as_it_is_imported_is_told_of_in_a_line(
    failure: OSError, told: str
) -> None:
    def find() -> Callable[[], None]:
        raise failure

    with pytest.raises(ImportError) as caught:
        find_on_all(a_world(told), "it", find, "build it")
    expected = f"it cannot be imported on any rank ({told}); build it, or leave the method out"
    assert str(caught.value) == expected


def test_the_environment_is_put_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(KeyError), environment({"LOCAL_RANK": "1", "DS_ACCELERATOR": "cpu"}):
        assert os.environ["LOCAL_RANK"] == "1"
        raise KeyError
    assert os.environ["LOCAL_RANK"] == "7" and "DS_ACCELERATOR" not in os.environ
