"""Layer timer: how long each layer of a model computes, measured while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.layout import spec_of
from dearmpi.plan.data.workload import Workload
from dearmpi.plan.model.profile import LayerTimes, ModelProfile, parse_profile
from dearmpi.torch_internals import number_of_backprop
from dearmpi.tune.layer_passes import (
    Leg,
    Mark,
    OwnHook,
    Pass,
    Stopwatch,
    build_layers,
    find_homes,
    no_wait,
    stopwatch_for,
    summarize,
)


class _Phase(Enum):
    OUTSIDE = auto()
    FEEDING = auto()  # inside the model's forward
    IGNORED = auto()  # inside one that no backprop follows, or that backprop repeats


class LayerTimer:
    """Watches ``model`` train and times its layers: the modules that own parameters.

    The feed-forward is cut where a layer is about to run, which is where it waits for its
    parameters. So activations, reshaping and the like count with the layer before them, and the
    parts add up to the whole. In the same way backprop is cut where the last gradient of a layer
    is ready, since that is what its bucket waits for: the loss counts with the layer whose
    gradients come first, and activations that are computed again with the layer that needs them.
    Waiting in hooks that run before a layer does not count, nor does what ``waited`` tells of.

    A pass is a feed-forward and what is propagated back before the next one: an iteration, or
    with accumulated gradients a micro-batch. Feed-forwards without gradients are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Iterable[nn.Parameter] | None = None,
        num_warmup: int = 1,
        waited: Callable[[], float] = no_wait,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Attach to ``model``.

        params: those to be listed in the profile; default: all of the model. None without elements
            is, since no bucket has it.
        num_warmup: passes at the start that do not count.
        waited: seconds of waiting so far, such as ``lambda: optimizer.waited_s``; on the CPU only.
        """
        if num_warmup < 0:
            raise ConfigError(f"{num_warmup} warm-up passes; give 0 or more", code="out-of-range")
        self._model = model
        wanted = set(model.parameters() if params is None else params)
        self._names = {p: name for name, p in model.named_parameters() if p in wanted and p.numel()}
        if not any(param.requires_grad for param in self._names):
            raise ConfigError(
                "no parameter of the model requires grad: there is no backprop",
                code="nothing-to-train",
            )
        self._stopwatch = stopwatch or stopwatch_for(model, waited)
        self._num_warmup = num_warmup
        self._passes: list[Pass] = []
        self._pass = Pass()
        self._phase = _Phase.OUTSIDE
        self._open: tuple[str | None, Mark] | None = None
        self._handles: list[RemovableHandle] = []
        self._homes = find_homes(model, self._names)
        self._attach()

    @property
    def num_passes(self) -> int:
        """Passes seen so far that count; the last may still be under way."""
        return max(0, self.num_seen - self._num_warmup)

    @property
    def num_seen(self) -> int:
        """Passes seen so far, those that do not count among them."""
        return len(self._passes) + bool(self._pass.ready)

    def detach(self) -> None:
        """Leave the model as it was. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(
        self, *, name: str = "", batch_size: int = 1, unit: str = "sample", world_size: int = 1
    ) -> ModelProfile:
        """Detach, and tell what was measured: medians over the passes that count.

        name: of the model; default: its class. batch_size: samples of a pass on this rank.
        world_size: ranks that trained meanwhile. Raises UsageError if no pass was seen that counts.
        """
        self.detach()
        passes = [*self._passes, *([self._pass] if self._pass.ready else [])]
        counted = passes[self._num_warmup :]
        if not counted:
            raise UsageError(
                f"{len(passes)} passes through the model were seen, of which the first "
                f"{self._num_warmup} do not count; train for more iterations, and with "
                "torch.compile profile the model before it is compiled",
                code="measurement-too-short",
            )
        self._stopwatch.settle()
        specs = [spec_of(param, name) for param, name in self._names.items()]
        times = summarize(counted, self._stopwatch)
        layers, layer_times = build_layers(specs, self._homes, times)
        return ModelProfile(
            Workload(
                name or type(self._model).__name__,
                source=f"measured over {len(counted)} passes",
                layers=layers,
                batch_size=batch_size,
                unit=unit,
            ),
            layer_times,
            device=_describe_device(next(iter(self._names))),
            world_size=world_size,
        )

    def _attach(self) -> None:
        add = self._handles.append
        layers = {place for places in self._homes.values() for place in places}
        for name, module in self._model.named_modules():
            if name in layers:
                # Hooks of others that run before a layer, and may wait, lie between these two.
                add(module.register_forward_pre_hook(OwnHook(self._arrive), prepend=True))
                add(module.register_forward_pre_hook(OwnHook(partial(self._enter, name))))
                add(module.register_forward_hook(OwnHook(self._leave), always_call=True))
        add(self._model.register_forward_pre_hook(OwnHook(self._begin), prepend=True))
        add(self._model.register_forward_hook(OwnHook(self._end), always_call=True))
        for param, name in self._names.items():
            if param.requires_grad:
                add(param.register_post_accumulate_grad_hook(partial(self._grad_ready, name)))

    def _begin(self, *_: Any) -> None:
        """The model is about to run."""
        self._phase = _Phase.FEEDING if _is_original() else _Phase.IGNORED
        if self._phase is _Phase.FEEDING:
            self._start_pass()
            self._open = (None, self._stopwatch.mark())

    def _end(self, *_: Any) -> None:
        """The model has run."""
        if self._phase is _Phase.FEEDING:
            self._pass.ended = self._stopwatch.mark()
            self._close(self._pass.ended)
        self._phase = _Phase.OUTSIDE

    def _arrive(self, *_: Any) -> None:
        """A layer is about to run, and may have to wait."""
        if self._counts():
            if self._phase is _Phase.OUTSIDE:
                self._start_pass()
            self._close(self._stopwatch.mark())

    def _enter(self, layer: str, *_: Any) -> None:
        if self._counts():
            self._open = (layer, self._stopwatch.mark())

    def _leave(self, *_: Any) -> None:
        """A layer has run: where the model as a whole is not called, it may be the last."""
        if self._phase is _Phase.OUTSIDE and self._counts():
            self._pass.ended = self._stopwatch.mark()

    def _grad_ready(self, name: str, *_: Any) -> None:
        """Autograd has finished a gradient."""
        if self._pass.ended is not None:
            self._close(self._pass.ended)
            self._pass.ready[name] = self._stopwatch.mark()

    def _counts(self) -> bool:
        """Whether what runs now is part of a feed-forward with a backprop to follow."""
        if self._phase is _Phase.OUTSIDE:
            return _is_original()
        return self._phase is _Phase.FEEDING

    def _start_pass(self) -> None:
        if self._pass.ready:
            self._passes.append(self._pass)
            self._pass = Pass()

    def _close(self, stop: Mark) -> None:
        if self._open is not None:
            self._pass.legs.append(Leg(*self._open, stop))
            self._open = None


def _is_original() -> bool:
    """Whether a feed-forward runs for the first time: with gradients, not repeated by backprop."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and number_of_backprop() == -1


def _describe_device(param: nn.Parameter) -> str:
    if param.is_cuda:
        return torch.cuda.get_device_name(param.device)
    return f"{param.device.type}, {torch.get_num_threads()} threads of torch"


def slowest_profile(world: World, profile: ModelProfile) -> ModelProfile:
    """Rank 0's layers, with the mean of their times, as a whole as slow as the slowest rank's.

    Not each layer's slowest time: noise, which differs between ranks, would add up (collective).
    """
    whole = parse_profile(world.broadcast_text(profile.to_json()), "the profile of rank 0")
    own = {layer.name: times for layer, times in profile.layers()}
    mine = [own.get(layer.name, LayerTimes(0.0, 0.0)) for layer in whole.workload.layers]
    passes = [
        [times.feed_forward_s for times in mine],
        [times.backprop_s for times in mine],
    ]
    slowest = world.all_reduce([math.fsum(seconds) for seconds in passes], "max")
    sums = world.all_reduce([*passes[0], *passes[1]], "sum")
    feed_forward, backprop = (
        _as_slow_as(whole_s, total)
        for whole_s, total in zip(slowest, (sums[: len(mine)], sums[len(mine) :]), strict=True)
    )
    return replace(whole, times=tuple(map(LayerTimes, feed_forward, backprop)))


def _as_slow_as(whole_s: float, sums: list[float]) -> list[float]:
    """``sums`` in proportion, ``whole_s`` seconds together."""
    factor = whole_s / math.fsum(sums) if any(sums) else 0.0
    return [total * factor for total in sums]
