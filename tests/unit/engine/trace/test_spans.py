"""Spans: what the engine tells of an iteration, and that nobody listening changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.trace.layer_spans import LayerSpans
from dearmpi.engine.trace.spans import Spans
from dearmpi.span import Span, Track
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain
from tests.unit.engine.heard import Heard


def train(world: World, *, num_steps: int = 3, **settings: Any) -> Heard:
    heard, model = Heard(), Chain(3)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        world=world,
        bucket_cap_mb=1e-6,
        **settings,
    )
    optimizer.spans.recorder = heard
    for step in range(num_steps):
        optimizer.spans.iteration = step + 1
        model.backward()
        optimizer.step()
    optimizer.synchronize()
    optimizer.spans.recorder = None
    model.backward()
    optimizer.step()
    optimizer.close()
    return heard


@pytest.mark.parametrize("settings", [{}, {"eager": True}, {"schedule": "wfbp"}])
def test_a_bucket_is_reduced_then_updated_then_gathered(settings: dict[str, Any]) -> None:
    for heard in run_ranks(2, lambda world: train(world, **settings)):
        for iteration in (1, 2, 3):
            for bucket in range(3):
                reduced = heard.named(f"RS{bucket}", iteration)
                updated = heard.named(f"U{bucket}", iteration)
                gathered = heard.named(f"AG{bucket}", iteration)
                assert reduced.queued_s is not None and reduced.queued_s <= reduced.start_s
                assert reduced.start_s <= reduced.stop_s <= updated.start_s
                assert updated.stop_s <= gathered.start_s <= gathered.stop_s
                assert (reduced.track, updated.track) == (Track.REDUCE_SCATTER, Track.UPDATE)
                assert (gathered.bucket, gathered.track) == (bucket, Track.ALL_GATHER)
                assert reduced.nbytes == gathered.nbytes == 4 * 16 * (bucket + 1) * (bucket + 2)
        assert {span.iteration for span in heard.spans} == {1, 2, 3}


def test_gathered_gradients_are_updated_after_the_gather() -> None:
    for heard in run_ranks(2, lambda world: train(world, gather="gradients")):
        assert heard.named("RS1", 2).stop_s <= heard.named("AG1", 2).start_s
        assert heard.named("AG1", 2).stop_s <= heard.named("U1", 2).start_s


def test_waits_of_the_main_thread_are_told() -> None:
    for heard in run_ranks(2, lambda world: train(world, schedule="serial")):
        waits = [span.name for span in heard.spans if span.track is Track.WAIT]
        assert "the last step's gathers" in waits


def test_alone_the_update_is_told(world: World) -> None:
    assert train(world).names() == ["update"] * 3


@pytest.fixture
def world() -> World:
    from dearmpi.comm.backends.alone import AloneCollectives

    return World(AloneCollectives(), progress="poll")


def test_torchs_profiler_sees_the_engines_spans() -> None:
    def work(world: World) -> None:
        train(world, num_steps=1)

    try:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} profiles one thread alone, and ranks are threads")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as seen:
        run_ranks(2, work)
    names = {event.name for event in seen.events()}
    assert names >= {"dearmpi U0", "dearmpi RS0 posted", "dearmpi RS0 done", "dearmpi AG2 done"}


def test_torchs_profiler_sees_layers_while_it_is_on(world: World) -> None:
    model = Nested()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world
    )

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        iterate()
    ranges = {e.name: e for e in seen.events() if e.name.startswith("dearmpi ")}
    for layer in ("first", "last"):
        backprop = ranges[f"dearmpi B {layer}"]
        assert ranges[f"dearmpi F {layer}"].cpu_parent is ranges["dearmpi F Nested"]
        assert "evaluate_function" in backprop.cpu_parent.name
        assert any("Backward" in child.name for child in backprop.cpu_children)
    iterate()
    assert not any(module._forward_hooks for module in model.modules())


class Nested(nn.Module):
    """A module with parameters of its own around others, one of which passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.same, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.same(self.first(inputs * self.scale)))
        return outputs


def watch(model: nn.Module, inputs: Tensor) -> tuple[Heard, LayerSpans]:
    spans, heard = Spans(), Heard()
    spans.recorder, spans.iteration = heard, 7
    layers = LayerSpans(model, spans)
    model(inputs).sum().backward()
    return heard, layers


def check_nesting(spans: Sequence[Span]) -> None:
    """Of two spans, one lies in the other or they are apart."""
    for one in spans:
        for other in spans:
            if one.start_s < other.start_s:
                assert other.start_s >= one.stop_s or other.stop_s <= one.stop_s, (one, other)


def test_layers_are_told_in_feed_forward_and_backprop() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    heard, _ = watch(model, torch.ones(2, 4))
    assert heard.names() == ["F 0", "F 2", "B 2", "B 0"]
    assert {(span.track, span.iteration) for span in heard.spans} == {(Track.COMPUTE, 7)}
    check_nesting(heard.spans)


def test_of_layers_within_layers_each_has_its_backprop() -> None:
    heard, _ = watch(Nested(), torch.ones(2, 4))
    assert heard.names() == ["F first", "F last", "F Nested", "B last", "B first", "B Nested"]
    check_nesting(heard.spans)


def test_checkpointed_layers_are_told_again_within_backprop() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Any:
            inner = torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)
            return self.last(inner)

    heard, _ = watch(Checkpointed(), torch.ones(2, 4))
    assert heard.names().count("F inner.0") == 2
    check_nesting(heard.spans)


def test_evaluation_and_a_removed_listener_tell_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    heard, layers = watch(model, torch.ones(2, 4))
    before = len(heard.spans)
    with torch.no_grad():
        model(torch.ones(2, 4))
    layers.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert len(heard.spans) == before


def test_a_layer_that_fails_leaves_nothing_open() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 1))
    spans, heard = Spans(), Heard()
    spans.recorder = heard
    layers = LayerSpans(model, spans)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    model[0](torch.ones(2, 4)).sum().backward()
    assert heard.names() == ["F 0", "F 0", "B 0"]
    check_nesting(heard.spans)
    layers.remove()


def test_watching_changes_no_number() -> None:
    def gradients(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Nested()
        if watched:
            watch(model, torch.ones(2, 4))
        else:
            model(torch.ones(2, 4)).sum().backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    for one, other in zip(gradients(watched=True), gradients(watched=False), strict=True):
        assert torch.equal(one, other)
