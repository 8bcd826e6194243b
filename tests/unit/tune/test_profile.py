from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dearmpi.comm.fake import FakeClock, FakeHub
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.profile import ModelProfile
from dearmpi.tune.profile import LayerTimer, slowest_profile
from dearmpi.tune.stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch
from tests.unit.engine.chain import Chain


class ClockStopwatch:
    """Marks are readings of a clock that only the tests' models move."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock.now()

    def settle(self) -> None:
        pass

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class Ticks(ClockStopwatch):
    """Every mark is one later than the one before: tells the order of things."""

    def __init__(self) -> None:
        self._ticks = count()

    def mark(self) -> float:
        return float(next(self._ticks))


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, advance: Callable[[], None]) -> Tensor:
        ctx.advance = advance
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.advance()
        return grads[0], None


def spend(inputs: Tensor, clock: FakeClock, *, forward: float = 0, backward: float = 0) -> Tensor:
    """``inputs``, after some time; as much as is said for the backprop passes there."""
    clock.advance(forward)
    outputs: Tensor = _AtBackward.apply(inputs, lambda: clock.advance(backward))  # type: ignore[no-untyped-call]
    return outputs


class Timed(nn.Linear):
    """A layer whose time is known."""

    def __init__(self, clock: FakeClock, forward: float, backward: float, **kw: Any) -> None:
        super().__init__(4, 4, **kw)
        self.clock, self.times = clock, (forward, backward)

    def forward(self, input: Tensor) -> Tensor:
        forward, backward = self.times
        return spend(super().forward(input), self.clock, forward=forward, backward=backward)


def chain(clock: FakeClock) -> nn.Sequential:
    return nn.Sequential(Timed(clock, 1, 10), Timed(clock, 2, 20), Timed(clock, 3, 30))


def set_times(layer: nn.Module, forward: float, backward: float) -> None:
    assert isinstance(layer, Timed)
    layer.times = (forward, backward)


def timer(model: nn.Module, clock: FakeClock, **settings: Any) -> LayerTimer:
    settings = {"num_warmup": 0, "stopwatch": ClockStopwatch(clock), **settings}
    return LayerTimer(model, **settings)


def train(model: nn.Module, num_passes: int = 1) -> None:
    for _ in range(num_passes):
        model(torch.ones(2, 4)).sum().backward()


def shown(profile: ModelProfile) -> list[tuple[str, float, float]]:
    return [(layer.name, t.feed_forward_s, t.backprop_s) for layer, t in profile.layers()]


def params_of(profile: ModelProfile) -> dict[str, list[str]]:
    return {layer.name: [spec.name for spec in layer.params] for layer, _ in profile.layers()}


def test_each_layer_has_its_times_and_parameters() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    train(model, 3)
    assert watch.num_passes == 3
    profile = watch.finish(name="chain", batch_size=2, unit="img", world_size=5)
    assert shown(profile) == [("0", 1, 10), ("1", 2, 20), ("2", 3, 30)]
    workload = profile.workload
    assert (workload.name, workload.batch_size, workload.unit) == ("chain", 2, "img")
    assert profile.world_size == 5 and profile.device.startswith("cpu")
    assert params_of(profile)["1"] == ["1.weight", "1.bias"]
    weight = next(workload.params())
    assert (weight.shape, weight.dtype, weight.trained) == ((4, 4), "float32", True)


class Glued(nn.Module):
    """Time passes before, between and behind the layers."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.one, self.two = Timed(clock, 1, 10), Timed(clock, 2, 20)

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock.advance(0.5)
        inner = spend(self.one(inputs), self.clock, forward=0.25, backward=5)
        return spend(self.two(inner), self.clock, forward=0.125, backward=3)


def test_what_lies_between_layers_belongs_to_the_one_before_and_nothing_is_lost() -> None:
    clock = FakeClock()
    model = Glued(clock)
    watch = timer(model, clock)
    outputs = model(torch.ones(2, 4))
    clock.advance(7)  # the loss
    outputs.sum().backward()
    assert shown(watch.finish()) == [("one", 1.75, 15), ("two", 2.125, 30)]


def test_waiting_in_front_of_a_layer_does_not_count() -> None:
    clock = FakeClock()
    model = chain(clock)
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: clock.advance(100), prepend=True)
    watch = timer(model, clock)
    train(model)
    assert shown(watch.finish()) == [("0", 1, 10), ("1", 2, 20), ("2", 3, 30)]


def test_the_median_counts_and_warm_up_does_not() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock, num_warmup=2)
    for forward, backward in ((99, 99), (99, 99), (1, 10), (4, 12), (2, 40)):
        set_times(model[0], forward, backward)
        train(model)
    assert watch.num_passes == 3
    assert shown(watch.finish())[0] == ("0", 2, 12)


def test_a_layer_used_twice_has_the_time_of_both_uses() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    model(model(torch.ones(2, 4))).sum().backward()
    profile = watch.finish()
    assert [(name, forward) for name, forward, _ in shown(profile)] == [
        ("0", 2),
        ("1", 4),
        ("2", 6),
    ]
    assert profile.backprop_s == 120


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_counts_as_backprop(whole: bool, reentrant: bool) -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    inputs = torch.ones(2, 4, requires_grad=True)
    if whole:
        outputs = checkpoint(model, inputs, use_reentrant=reentrant)
    else:
        last = model[2]
        model.forward = lambda x: last(  # type: ignore[method-assign]
            checkpoint(nn.Sequential(model[0], model[1]), x, use_reentrant=reentrant)
        )
        outputs = model(inputs)
    outputs.sum().backward()
    if whole and reentrant:  # to torch, and to us, a feed-forward without gradients
        with pytest.raises(UsageError):
            watch.finish()
        return
    # Without reentrance torch stops as soon as it has what it needs: short of the last layer.
    again = 3 if whole or reentrant else 1
    profile = watch.finish()
    assert (profile.feed_forward_s, profile.backprop_s) == (6, 60 + again)
    late = "2" if whole else "1"
    assert {name: backward for name, _, backward in shown(profile)} == {
        name: backward + (again if name == late else 0)
        for name, backward in (("0", 10), ("1", 20), ("2", 30))
    }


def test_passes_without_backprop_are_left_out() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    train(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    train(model)
    model(torch.ones(2, 4))  # nobody propagates back
    assert watch.num_passes == 2
    assert watch.finish().feed_forward_s == 6


def test_a_forward_that_fails_does_not_confuse_it() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    train(model)
    clock.advance(50)
    train(model)
    clock.advance(50)
    train(model)
    assert shown(watch.finish()) == [("0", 1, 10), ("1", 2, 20), ("2", 3, 30)]


def test_a_model_whose_parts_are_called_one_by_one_is_timed() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock)
    for _ in range(2):
        inner = model[1](model[0](torch.ones(2, 4)))
        clock.advance(9)
        outputs = model[2](inner)
        clock.advance(9)
        outputs.sum().backward()
        clock.advance(9)
    # What is between two layers may be part of the model; what follows the last is the loss.
    assert shown(watch.finish()) == [("0", 1, 10), ("1", 11, 20), ("2", 3, 39)]


class Tied(nn.Module):
    """The decoder's weight is the embedding's; its bias is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.decoder(self.middle(self.embedding(inputs)))
        return outputs


def test_a_tied_parameter_belongs_to_the_layer_that_uses_it_first() -> None:
    model = Tied()
    watch = LayerTimer(model, num_warmup=0, stopwatch=Ticks())
    train(model)
    profile = watch.finish()
    assert params_of(profile) == {
        "embedding": ["embedding.weight"],
        "middle": ["middle.weight", "middle.bias"],
        "decoder": ["decoder.bias"],
    }
    assert [layer.uses for layer in profile.workload.layers] == [(), (), ("embedding.weight",)]


class Functional(nn.Module):
    """Parameters that are used without their module being called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.body = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.fixed = nn.Linear(4, 4)
        self.fixed.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = self.fixed(inputs).unsqueeze(0) * self.scales[0]
        inner = self.body(self.attention(scaled, scaled, scaled)[0])
        return nn.functional.linear(inner, self.head.weight, self.head.bias)


def test_every_parameter_stands_once_where_it_is_used() -> None:
    model = Functional()
    watch = LayerTimer(model, num_warmup=0, stopwatch=Ticks())
    train(model, 2)
    profile = watch.finish()
    params = params_of(profile)
    assert params == {
        "scales": ["scales.0"],
        "fixed": ["fixed.weight", "fixed.bias"],
        "attention": ["attention.in_proj_weight", "attention.in_proj_bias"],
        "attention.out_proj": ["attention.out_proj.weight", "attention.out_proj.bias"],
        "body": ["body.weight", "body.bias"],
        "head": ["head.weight", "head.bias", "spare.weight", "spare.bias"],
    }
    assert list(params) == ["scales", "fixed", "attention", "attention.out_proj", "body", "head"]
    trained = {spec.name: spec.trained for spec in profile.workload.params()}
    assert trained["scales.0"] and not trained["fixed.weight"]


def test_a_model_of_functions_alone_is_timed() -> None:
    clock = FakeClock()

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterDict({"a": torch.eye(4)})
            self.head = nn.Linear(4, 4, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            inputs = spend(inputs @ self.weights["a"], clock, forward=2, backward=1)
            return spend(inputs @ self.head.weight, clock, forward=2, backward=3)

    model = Functions()
    watch = timer(model, clock)
    train(model)
    assert shown(watch.finish()) == [("weights", 1, 1), ("head", 3, 3)]


def test_only_the_parameters_asked_for_are_listed() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock, params=model[1].parameters())
    train(model)
    profile = watch.finish()
    assert params_of(profile) == {"1": ["1.weight", "1.bias"]}
    assert profile.feed_forward_s == 6  # nothing of the computation is lost


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def trained(*, timed: bool) -> dict[str, Tensor]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch = LayerTimer(model) if timed else None
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(3, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    if watch is not None:
        assert watch.num_passes == 4 and watch.finish().backprop_s > 0
    return model.state_dict()


def test_being_timed_changes_no_bit() -> None:
    plain, timed = trained(timed=False), trained(timed=True)
    assert all(torch.equal(plain[name], timed[name]) for name in plain)


def test_it_leaves_the_model_as_it_was() -> None:
    model = small_model()
    watch = LayerTimer(model)
    watch.detach()
    watch.detach()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    model(torch.ones(3, 1, 8, 8)).sum().backward()
    with pytest.raises(UsageError, match="0 passes"):
        watch.finish()


def test_too_few_passes_are_refused() -> None:
    clock = FakeClock()
    model = chain(clock)
    watch = timer(model, clock, num_warmup=3)
    train(model, 2)
    with pytest.raises(UsageError, match="2 passes .* first 3 do not count"):
        watch.finish()


def test_a_model_without_backprop_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires grad"):
        LayerTimer(small_model().requires_grad_(False))
    with pytest.raises(ConfigError, match="-1 warm-up"):
        LayerTimer(small_model(), num_warmup=-1)


WAIT_S = 0.02


def profile_while_distributed(world: World) -> tuple[float, float]:
    """Compute time of an iteration, and how long it waited."""
    model = Chain(4)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, bucket_cap_mb=1e-4
    )
    watch = LayerTimer(model, waited=lambda: optimizer.waited_s)
    for _ in range(4):
        optimizer.zero_grad()
        model.backward()
        optimizer.step()
    profile = watch.finish()
    waited_s = optimizer.waited_s / 4
    optimizer.close()
    assert [layer.name for layer in profile.workload.layers] == [f"layers.{n}" for n in range(4)]
    return profile.feed_forward_s + profile.backprop_s, waited_s


def test_waits_for_communication_are_no_computation() -> None:
    hub = FakeHub(2, seconds=lambda label, nbytes: WAIT_S)
    for compute_s, waited_s in run_ranks(2, profile_while_distributed, hub=hub):
        assert waited_s > 4 * WAIT_S
        assert compute_s < waited_s / 2


def test_a_clock_that_stands_still_while_waiting() -> None:
    waited_s = 0.0
    stopwatch: Stopwatch = HostStopwatch(lambda: waited_s)
    start = stopwatch.mark()
    waited_s = 1000.0
    assert -1000.0 <= stopwatch.seconds(start, stopwatch.mark()) < -900.0


class FakeEvent:
    """An event of a device that is ``late`` milliseconds behind the host."""

    def __init__(self, clock: FakeClock, settled: list[FakeEvent]) -> None:
        self._clock, self._settled = clock, settled
        self.at_s = -1.0

    def record(self) -> None:
        self.at_s = self._clock.now()

    def synchronize(self) -> None:
        self._settled.append(self)

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self._settled, "read before the device has come that far"
        return (end_event.at_s - self.at_s) * 1e3


def test_events_of_a_device_serve_as_marks() -> None:
    clock, settled = FakeClock(), list[FakeEvent]()
    model = chain(clock)
    stopwatch = DeviceStopwatch(lambda: FakeEvent(clock, settled))
    watch = timer(model, clock, stopwatch=stopwatch)
    train(model, 2)
    assert not settled  # nobody waits while training
    assert shown(watch.finish()) == [("0", 1, 10), ("1", 2, 20), ("2", 3, 30)]


def test_all_ranks_get_mean_times_that_add_up_to_the_slowest_rank_s() -> None:
    def profile_on(world: World) -> ModelProfile:
        clock = FakeClock()
        model = chain(clock)
        set_times(model[world.rank], 50, 500)
        watch = timer(model, clock)
        train(model)
        return slowest_profile(world, watch.finish(name=f"of rank {world.rank}"))

    one, other = run_ranks(2, profile_on)
    assert one == other
    assert one.workload.name == "of rank 0"
    # Rank 0 took 50, 2 and 3 s, rank 1 took 1, 50 and 3 s.
    assert one.feed_forward_s == pytest.approx(55)
    assert one.backprop_s == pytest.approx(550)
    shares = [times.feed_forward_s / 55 for times in one.times]
    assert shares == pytest.approx([51 / 109, 52 / 109, 6 / 109])
