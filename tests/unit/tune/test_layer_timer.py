"""Profile: each layer's time, whatever a script does with its model, and no bit of it changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.model.profile import ModelProfile, parse_profile
from dearmpi.tune.layer_timer import LayerTimer, slowest_profile
from tests.fakes import FakeClock
from tests.fakes.ranks import run_ranks
from tests.unit.tune.timed import Timed, chain, params_of, set_times, shown, spend, timer, train


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


def test_a_weight_that_is_called_first_under_its_other_name_survives_the_way_to_a_file() -> None:
    """The embedding takes the head's weight, whose name torch goes by."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.embedding = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
            self.embedding.weight = self.head.weight

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.head(self.embedding(inputs))
            return result

    model = Tied()
    watch = LayerTimer(model, params={p: n for n, p in model.named_parameters()}, num_warmup=0)
    model(torch.tensor([1, 2])).sum().backward()
    profile = watch.finish()
    assert params_of(profile) == {"embedding": ["head.weight"], "head": []}
    assert parse_profile(profile.to_json(), "a file") == profile


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


def test_a_parameter_without_elements_is_not_listed() -> None:
    """No bucket has it, so a plan could not place it."""
    model = nn.Linear(3, 2)
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    timer = LayerTimer(model, num_warmup=0)
    model(torch.ones(1, 3)).sum().backward()
    profile = timer.finish()
    assert [spec.name for spec in profile.workload.params()] == ["weight", "bias"]


def test_a_model_without_backprop_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires grad"):
        LayerTimer(small_model().requires_grad_(False))
    with pytest.raises(ConfigError, match="-1 warm-up"):
        LayerTimer(small_model(), num_warmup=-1)


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
