"""Updates on the host: the numbers of the device, what is saved, what is pinned, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig, GradScaler
from dearmpi.comm.world import World
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.update.master import HostMemory, HostShard
from dearmpi.errors import CommError, ConfigError
from dearmpi.plan.data.layout import ParamSpec, build_layout
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.lazy_device import LazyDevice, put_on
from tests.mpi.models import fill
from tests.mpi.oracle import OPTIMIZERS, copies, fingerprint, flat_state

Saved = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    """All engines' own, with an MPI that takes its memory: only updates copy anything."""
    works = tuple(ProbeVerdict(operation, works=True) for operation in OPERATIONS)
    monkeypatch.setattr("dearmpi.device.route_choice.known_verdicts", lambda: works)
    device = LazyDevice()
    put_on(monkeypatch, device)
    return device


class Model(nn.Module):
    """Its last layer has no gradient before step 2."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        fill(self)
        self.to(dtype)

    def loss(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        hidden = self.first(torch.randn(4, 5, generator=generator).to(self.scale.dtype)).tanh()
        outputs = self.last(hidden) if step >= 2 else hidden
        loss: Tensor = (self.scale * outputs).float().square().mean()
        return loss


class Training:
    """One rank's."""

    def __init__(self, world: World, *, inner: str, dtype: torch.dtype, **settings: Any) -> None:
        self.world, self.model = world, Model(dtype)
        self.optimizer = DistributedOptimizer(
            OPTIMIZERS[inner](self.model.parameters()),
            self.model,
            world=world,
            **{"bucket_cap_mb": 1e-4, **settings},
        )

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model.loss(step, self.world.rank).backward()
        self.optimizer.step()

    def saved(self) -> Saved:
        return copy.deepcopy((copies(self.model), self.optimizer.state_dict()))

    def load(self, saved: Saved) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))


def simply(training: Training) -> None:
    for step in range(4):
        training.step(step)


def laid_out_anew(training: Training) -> None:
    for step in range(4):
        training.step(step)
        training.optimizer.fuse((1.0, 2e-4, 1e-4, 1.0)[step])


def changed_by_hand(training: Training) -> None:
    for step in range(4):
        training.step(step)
        training.optimizer.synchronize()
        with torch.no_grad():
            training.model.first.weight[step].fill_(0.3)
            training.model.scale.mul_(1.1)


def clipped(training: Training) -> None:
    for step in range(4):
        training.model.loss(step, training.world.rank).backward()
        training.optimizer.clip_grad_norm_(0.01)
        training.optimizer.step()
        training.optimizer.zero_grad()


def scaled(training: Training) -> None:
    """The second step is not finite, and left out."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        training.optimizer.zero_grad()
        loss = training.model.loss(step, training.world.rank)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(training.optimizer)
        scaler.update()


SCRIPTS = [simply, laid_out_anew, changed_by_hand, clipped, scaled]
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 on the wire": {"dtype": torch.float32, "comm_dtype": "bf16"},
}


def outcome(size: int, script: Callable[[Training], None], **settings: Any) -> set[str]:
    """A digest of parameters and state on each rank; one, if they agree."""

    def rank(world: World) -> str:
        training = Training(world, **{"inner": "adam", **settings})
        script(training)
        model, state = training.saved()
        training.optimizer.close()
        in_fp32 = {name: value.float() for name, value in model.items()}
        return fingerprint(in_fp32) + fingerprint(flat_state(state))

    return set(run_ranks(size, rank))


@turns_of(script=SCRIPTS, precision=[*SETTINGS])
def test_the_host_makes_the_numbers_of_the_device_bit_by_bit(
    script: Callable[[Training], None], precision: str
) -> None:
    """Of a device whose optimizer has masters as well."""
    settings = SETTINGS[precision]
    masters = settings["dtype"] is torch.bfloat16
    expected = outcome(2, script, **settings, master_weights=masters)
    assert outcome(2, script, **settings, update_on="host") == expected
    assert len(expected) == 1


@turns_of(script=SCRIPTS, route=["staged", "direct"], place=["host", "device"])
def test_weights_of_shards_change_no_number(
    script: Callable[[Training], None], route: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has no shard, and rank 2 three times that of rank 0; a chunk has 64 bytes."""
    monkeypatch.setattr("dearmpi.device.routes.CHUNK_BYTES", 64)

    def rank(world: World, **settings: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
        settings |= {"dtype": torch.float64, "update_on": place, "cuda_buffers": route}
        training = Training(world, inner="adam", **settings)
        is_uneven = any(not bucket.cuts.is_even for bucket in training.optimizer.layout)
        assert is_uneven == ("shards" in settings)
        script(training)
        model, state = training.saved()
        training.optimizer.close()
        return model, [flat_state(state)[key] for key in sorted(flat_state(state))]

    expected = run_ranks(3, rank)[0]
    for found in run_ranks(3, lambda world: rank(world, shards=[1, 0, 3])):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_updates_during_backprop(size: int) -> None:
    expected = outcome(size, simply, dtype=torch.float32, eager=True)
    assert outcome(size, simply, dtype=torch.float32, eager=True, update_on="host") == expected


def resume(size: int, first: int, start: Saved | None, **settings: Any) -> Saved:
    """Three steps more."""

    def rank(world: World) -> Saved:
        training = Training(world, inner="amsgrad", **settings)
        if start is not None:
            training.load(start)
        for step in range(first, first + 3):
            training.step(step)
        saved = training.saved()
        training.optimizer.close()
        return saved

    return run_ranks(size, rank)[0]


@turns_of(
    precision=[*SETTINGS],
    places=[("host", "device"), ("device", "host"), ("host", "host")],
)
def test_a_run_goes_on_wherever_it_was_updated_before(
    precision: str, places: tuple[str, str]
) -> None:
    settings = SETTINGS[precision]
    masters = settings["dtype"] is torch.bfloat16
    expected, found = (
        resume(2, 0, None, **settings, **one)
        for one in ({"master_weights": masters}, on(places[0], masters))
    )
    expected = resume(3, 3, expected, **settings, master_weights=masters)
    found = resume(3, 3, found, **settings, **on(places[1], masters))
    assert fingerprint(flat_state(found[1])) == fingerprint(flat_state(expected[1]))
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value)


def on(place: str, masters: bool) -> dict[str, Any]:
    """The settings for it."""
    return {"update_on": place, "master_weights": masters and place == "device"}


@pytest.mark.parametrize("places", [("host", "device"), ("device", "host")])
def test_masters_come_and_go_with_the_setting(places: tuple[str, str]) -> None:
    """Also the rest of the state has the precision of what is updated."""
    start = resume(2, 0, None, dtype=torch.bfloat16, update_on=places[0])
    found = resume(3, 3, start, dtype=torch.bfloat16, update_on=places[1])
    for entries in found[1]["state"].values():
        assert ("master" in entries) == (places[1] == "host")
        kept = torch.float32 if places[1] == "host" else torch.bfloat16
        assert entries["exp_avg"].dtype == kept


def test_masters_keep_what_half_precision_would_lose() -> None:
    def rank(world: World) -> tuple[Saved, Saved]:
        training = Training(world, inner="plain", dtype=torch.bfloat16, update_on="host")
        training.optimizer.param_groups[0]["lr"] = 1e-5
        before = training.saved()
        for step in range(2, 5):
            training.step(step)
        after = training.saved()
        training.optimizer.close()
        return before, after

    for (before, _), (after, state) in run_ranks(2, rank):
        assert torch.equal(before["first.weight"], after["first.weight"])
        master = state["state"][0]["master"]
        assert master.dtype == torch.float32
        assert not torch.equal(master, after["first.weight"].float())


def test_a_shard_comes_behind_what_is_queued_and_goes_back_before_what_follows(
    device: LazyDevice,
) -> None:
    layout, param = build_layout([[ParamSpec("p", (4,))]], 1), nn.Parameter(torch.zeros(4))
    bucket = BucketRuntime(
        layout.buckets[0], [param], rank=0, gradients=Arena(layout), parameters=Arena(layout)
    )
    comm_stream = DeviceCommStream(device, wrap=None)
    shard = HostShard(bucket, rank=0, memory=HostMemory(comm_stream, most_bytes=16))
    gradients = torch.full((4,), 2.0)
    comm_stream.copy(gradients, into=bucket.gradients.shard)
    comm_stream.copy(gradients, into=param.detach())
    fetch = shard.start_fetch()
    assert [fetch.test() for _ in range(2)] == [False, True]
    assert torch.equal(shard.gradients, gradients) and torch.equal(shard.parameters, gradients)
    shard.parameters.add_(shard.gradients)
    shard.send_back()
    assert torch.equal(param.detach(), gradients)
    with comm_stream.running():
        assert torch.equal(param.detach(), 2 * gradients)


def test_pinned_are_the_own_parameters_and_two_shards_of_gradients(device: LazyDevice) -> None:
    def rank(world: World) -> tuple[int, int]:
        training = Training(world, inner="adam", dtype=torch.float32, update_on="host")
        training.step(2)
        shards = [bucket.nbytes // world.size for bucket in training.optimizer.layout]
        training.optimizer.close()
        return sum(shards), max(shards)

    whole, largest = run_ranks(2, rank)[0]
    unpadded = sum(param.nbytes for param in Model(torch.float32).parameters())
    assert 2 * whole <= unpadded + 16  # of padding
    assert device.pinned_bytes <= 2 * (whole + 2 * largest)


def test_a_device_that_is_lost_on_the_way_to_the_host_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_on(monkeypatch, LazyDevice(fails_at=5))
    with pytest.raises(CommError, match=r"update of bucket .* lazy:0 \(stand-in\) failed: CUDA"):
        outcome(2, simply, dtype=torch.float32, update_on="host")


class DeviceOnly(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no kernel for tensors on cpu")


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (lambda params: torch.optim.Adam(params, capturable=True), "capturable=True"),
        (lambda params: DeviceOnly(params, lr=0.1), "no kernel for tensors on cpu"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_cannot_work_on_the_host_is_refused(
    size: int, inner: Callable[..., torch.optim.Optimizer], said: str
) -> None:
    def rank(world: World) -> None:
        model = Model(torch.float32)
        with raises(ConfigError, "trial-step-failed", "update_on", "'host'", said):
            DistributedOptimizer(inner(model.parameters()), model, world=world, update_on="host")

    run_ranks(size, rank)


def test_updates_of_whole_parameters_on_every_host_are_refused() -> None:
    with raises(ConfigError, "settings-contradict", "update_on", "'host'", "'gradients'"):
        EngineConfig(update_on="host", gather="gradients")


@pytest.mark.parametrize(("place", "count"), [("host", 3), ("device", 1)])
def test_updates_on_the_host_have_torchs_threads(place: Any, count: int) -> None:
    """No computation needs the host's cores meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def rank(world: World) -> int:
        model, seen = Model(torch.float32), list[int]()
        inner = torch.optim.Adam(model.parameters())
        optimizer = DistributedOptimizer(inner, model, world=world, update_on=place)
        world.on_progress_thread(lambda: seen.append(torch.get_num_threads()))
        optimizer.close()
        return seen[0]

    try:
        assert run_ranks(2, rank) == [count, count]
    finally:
        torch.set_num_threads(before)
