"""Which layer a parameter is listed with, and which layers take part of the time."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.search.planner import make_plan
from dearmpi.tune.layer_timer import LayerTimer
from tests.fakes import FakeClock
from tests.unit.tune.timed import ClockStopwatch, chain, params_of, shown, spend, timer, train


class Ticks(ClockStopwatch):
    """Every mark is one later than the one before: tells the order of things."""

    def __init__(self) -> None:
        self._ticks = count()

    def mark(self) -> float:
        return float(next(self._ticks))


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
        "scales": ["spare.weight", "spare.bias", "scales.0"],
        "fixed": ["fixed.weight", "fixed.bias"],
        "attention": ["attention.in_proj_weight", "attention.in_proj_bias"],
        "attention.out_proj": ["attention.out_proj.weight", "attention.out_proj.bias"],
        "body": ["body.weight", "body.bias"],
        "head": ["head.weight", "head.bias"],
    }
    assert list(params) == ["scales", "fixed", "attention", "attention.out_proj", "body", "head"]
    trained = {spec.name: spec.trained for spec in profile.workload.params()}
    assert trained["scales.0"] and not trained["fixed.weight"]


def test_what_never_has_a_gradient_holds_up_no_reduce_scatter_of_a_plan() -> None:
    """In the engine its bucket waits for the end of backprop, wherever it stands."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
            self.spare = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.layers(inputs)
            return out

    model = Unused()
    watch = LayerTimer(model, num_warmup=0, stopwatch=Ticks())
    train(model, 2)
    profile = watch.finish()
    link = LinkModel(0.1, 1e-3)
    plan = make_plan(profile, Costs(4, link, link), world_size=4, eager=True)
    assert len(plan.buckets) > 1
    last = plan.schedule.reduce_scatters[-1]
    assert {"spare.weight", "spare.bias"} <= set(plan.buckets[last])


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
