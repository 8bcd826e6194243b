"""LocalOptimizer: local SGD, DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import Compress, EngineConfig, check_choice
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.checks import check_arguments, optimized_parameters
from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
from dearmpi.engine.trace.spans import IterationTimes
from dearmpi.errors import ConfigError, UsageError
from dearmpi.guessed import LOCAL_SETTINGS, answers_guesses
from dearmpi.local.anchor import Anchor
from dearmpi.local.local_saving import LocalSaving, Merge
from dearmpi.local.sync_settings import (
    check_mix,
    check_outer,
    check_schedule,
    choose_config,
    choose_schedule,
    compare_ranks,
    refuse_synchronized,
    with_buckets,
)

InnerState = Literal["keep", "average"]

AVERAGING: Mapping[str, Any] = MappingProxyType(
    {
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "fragments": 1,
        "delay": 0,
        "mix": 0.0,
        "compress": "none",
    }
)
"""Arguments with which ranks go on from the mean of their parameters."""


class LocalOptimizer(LocalSaving):
    """An optimizer whose ranks train by themselves and exchange what they learned now and then.

    Use it as the ``inner`` optimizer. Each rank takes ``sync_every`` steps of it; then an outer
    SGD with Nesterov momentum steps on the mean of what the ranks have changed, and all ranks go on
    from the result. The model is cut into ``fragments`` whose exchanges are spread over these
    steps. The result of an exchange is merged ``delay`` steps after its start, and only then
    waited for. NaN or infinity on one rank then raises NonFiniteLossError on all.

    Ranks must take equal numbers of steps. Between exchanges they have different parameters;
    the values that they share are the anchor (``at_anchor``). Model buffers stay each rank's own.

    world, num_steps: the ranks; steps so far. exchanges: when fragments travel. fragments: names of
    their parameters. mix, sync_after, compress: as given. outer: trains the shared values.
    """

    @answers_guesses("LocalOptimizer", LOCAL_SETTINGS)
    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        *,
        sync_every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.8,
        fragments: int | None = None,
        delay: int | None = None,
        mix: float = 0.0,
        compress: Compress | None = None,
        sync_after: int = 0,
        state: InnerState = "keep",
        world: World | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """Rank 0's parameters and buffers are copied to all ranks (collective).

        fragments: None: 8, or as many as ``sync_every`` and the model's buckets allow.
        delay: None: 5, or as many steps as the schedule allows.
        mix: the part of its own values that a rank keeps at a merge; the paper has 0.5.
        compress: of what is exchanged, as in ``EngineConfig``; None: ``int4``, for parameters in
            host memory.
        sync_after: steps at the start in which gradients are averaged as by DistributedOptimizer.
        state: of the inner optimizer at a merge: each rank's own, or ``average``, which travels
            whole and is waited for.
        config: other settings of the exchange.

        Raises ConfigError for what cannot be served, MismatchError where ranks differ.
        """
        check_arguments(inner, model, None)
        check_schedule(sync_every, fragments, delay, sync_after=sync_after)
        check_outer(outer_lr, outer_momentum)
        check_choice("state", state, get_args(InnerState))
        config = choose_config(config, compress, inner)
        refuse_synchronized(model)
        super().__init__(inner.param_groups, inner.defaults)
        self._optimizer = inner
        self.world = choose_world(world)
        given = f"LocalOptimizer({sync_every=}, {outer_lr=}, {outer_momentum=}, {fragments=}, "
        given += f"{delay=}, {mix=}, compress={config.compress!r}, {sync_after=}, {state=})"
        compare_ranks(self.world, given)
        names = optimized_parameters(inner, model)
        self._trained = {name: param for param, name in names.items() if _is_number(param)}
        config, num_buckets = with_buckets(config, fragments, self._trained, self.world.size)
        self.exchanges = choose_schedule(sync_every, fragments, delay, num_buckets)
        self.mix = check_mix(mix, self.exchanges.delay)
        broadcast_buffers(model, self.world)
        broadcast_parameters(model, self.world)
        self._anchor = Anchor(
            self._trained, world=self.world, lr=outer_lr, momentum=outer_momentum, config=config
        )
        try:
            self.fragments = self._anchor.fragments(self.exchanges.fragments)
            self._dense = _dense_phase(inner, model, self.world, sync_after)
        except BaseException:
            self._anchor.close()
            raise
        self._averaging: Channel | None = None
        if state == "average":
            self._averaging = self.world.open_channel("inner state", window=1)
        self._controller, self.spans = self.outer._controller, self.outer.spans
        self._times = IterationTimes()
        self.compress, self.sync_after = config.compress, sync_after
        self.num_steps = 0
        self._under_way: Merge | None = None
        self._is_closed = False
        self._show()

    @classmethod
    def average(
        cls, inner: Optimizer, model: nn.Module, *, sync_every: int = 8, **more: Any
    ) -> Self:
        """Local SGD: every ``sync_every`` steps all ranks go on from the mean of their parameters.

        ``more``: ``sync_after``, ``state``, ``world``, ``config`` and ``compress``.
        """
        for name in more:
            if name in AVERAGING and name != "compress":
                raise ConfigError(
                    f"average() has no {name}, which it sets itself; call LocalOptimizer()",
                    code="settings-contradict",
                )
        return cls(inner, model, sync_every=sync_every, **{**AVERAGING, **more})

    @property
    def times(self) -> IterationTimes:
        """Communication that the last step has ended: none in a step without an exchange."""
        return self._times

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for exchanges."""
        return self.outer.waited_s + (self._dense.waited_s if self._dense is not None else 0.0)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step; where the schedule says so, start an exchange and merge one."""
        self._refuse_closed("step()")
        if closure is not None:
            raise _refused("step() with a closure", "call backward() before step()")
        if "found_inf" in vars(self):
            raise _refused(
                "a gradient scaler", "which would skip steps on some ranks alone; use bfloat16"
            )
        self._times = IterationTimes()
        if self._dense is not None:
            self._dense.step()
            self._times = self._dense.times
        else:
            self._check_shared()
            self._step_alone()
        self._mark_stepped()
        self.num_steps += 1
        if self.num_steps > self.sync_after:
            self._exchange()
        elif self._dense is not None and self.num_steps == self.sync_after:
            self._end_dense()

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of this rank."""
        (self._dense or self._optimizer).zero_grad(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients; they are local anyhow, but before ``sync_after``."""
        if self._dense is None:
            yield
        else:
            with self._dense.no_sync():
                yield

    def join(self) -> NoReturn:
        """Refused: ranks must take equal numbers of steps."""
        raise _refused("join()", "give every rank as many batches")

    @torch.no_grad()
    @untraced
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale this rank's gradients so that their norm is at most ``max_norm``; the norm before.

        Before ``sync_after`` the norm is of averaged gradients (collective).
        """
        if self._dense is not None:
            return self._dense.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self._trained.values(), max_norm, norm_type)

    def scale_gradients_(self, factor: float) -> bool:
        """Refused: it may skip a step."""
        raise _refused("scale_gradients_()", "which may skip a step; use bfloat16")

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the model has the shared values, equal on all ranks: to evaluate and export it.

        They are those of the last exchange. Do not step inside.
        """
        if self._dense is not None:
            self._dense.synchronize()
            yield
        else:
            with self._anchor.shown():
                yield

    @untraced
    def show_anchor(self) -> None:
        """Make the model's parameters the shared values for good, as at the end of training."""
        self.synchronize()
        if self._dense is None:
            self._anchor.restore()
            self._under_way = None

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, but for the groups of the inner optimizer."""
        if hasattr(self, "_is_closed"):
            raise _refused("add_param_group()", "close this optimizer and make another")
        super().add_param_group(param_group)

    @untraced
    def close(self) -> None:
        """End exchanges, of which the last is merged, and leave each rank its own parameters."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._dense is not None:
            self._dense.close()
        try:
            if self._under_way is not None:
                self._merge()
        finally:
            self._close_exchanges()

    def _close_exchanges(self) -> None:
        """Give back what exchanges have taken (collective)."""
        self._anchor.close()
        if self._averaging is not None:
            self._averaging.close()

    def _switch(self, mode: str) -> None:
        getattr(self._optimizer, mode)()

    def _step_alone(self) -> None:
        self._optimizer.step()

    def _exchange(self) -> None:
        """Merge what is due, then start what the schedule starts now."""
        if self._under_way is not None and self._under_way.due <= self.num_steps:
            self._merge()
        local_step = self.num_steps - self.sync_after
        fragment = self.exchanges.starting(local_step)
        if fragment is not None:
            names = self.fragments[fragment]
            self._anchor.start_exchange(names)
            self._times = self.outer.times
            self._under_way = Merge(names, self.num_steps + self.exchanges.delay)
            if not self.exchanges.delay:
                self._merge()

    def _merge(self) -> None:
        assert self._under_way is not None
        names, self._under_way = self._under_way.names, None
        self._anchor.merge(names, self.mix)
        if self._averaging is not None:
            params = {name: self._trained[name] for name in names}
            _average_state(params, self._optimizer.state, self.world, self._averaging)

    def _end_dense(self) -> None:
        """From now on every rank has the whole state, and trains by itself."""
        assert self._dense is not None
        self._dense.close()
        self._dense = None
        self._anchor.take(self._trained)
        self._show()


# A scaler then leaves the decision to skip a step to step(), which refuses it.
LocalOptimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _refused(what: str, cure: str) -> UsageError:
    return UsageError(f"local steps have no {what}: {cure}", code="local-steps-forbid")


def _dense_phase(
    inner: Optimizer, model: nn.Module, world: World, sync_after: int
) -> DistributedOptimizer | None:
    """With whole gradients, so that every rank has the inner optimizer's state at the end."""
    if not sync_after:
        return None
    return DistributedOptimizer(inner, model, world=world, gather="gradients")


@torch.no_grad()
def _average_state(
    params: Mapping[str, nn.Parameter],
    state: Mapping[Tensor, Mapping[str, Any]],
    world: World,
    channel: Channel,
) -> None:
    """Replace the floating-point ``state`` of ``params``, such as momentum, by its mean over ranks
    (collective).

    It travels whole, in fp32 at least. State that some rank lacks, as of a parameter without
    gradients there, stays each rank's own.
    """
    tensors = {
        f"{name} {key} {value.numel()}": value
        for name, param in params.items()
        for key, value in state.get(param, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    of_ranks = [set(text.splitlines()) for text in world.all_gather_text("\n".join(tensors))]
    common = [tensors[label] for label in sorted(set.intersection(*of_ranks))]
    if not common:
        return
    is_double = any(value.dtype == torch.float64 for value in common)
    dtype = torch.float64 if is_double else torch.float32
    flat = torch.cat([value.reshape(-1).to("cpu", dtype) for value in common])
    channel.run("the inner optimizers' state", lambda c: c.start_all_reduce(flat, "sum"))
    means = flat.div_(world.size).split([value.numel() for value in common])
    for value, mean in zip(common, means, strict=True):
        value.copy_(mean.view(value.shape))


def _is_number(param: nn.Parameter) -> bool:
    return param.is_floating_point() or param.is_complex()
