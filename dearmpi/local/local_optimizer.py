"""LocalOptimizer: local SGD, DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.config import Compress, EngineConfig
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.readings import Readings
from dearmpi.engine.setup.checks import check_arguments, optimized_parameters
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
from dearmpi.engine.trace.spans import IterationTimes
from dearmpi.errors import CheckpointError, ConfigError, UsageError
from dearmpi.guessed import LOCAL_SETTINGS, answers_guesses
from dearmpi.local.anchor import Anchor
from dearmpi.local.rank_state import as_outer, join_entries, pieces_of_outer, pieces_of_rank
from dearmpi.local.sync_settings import (
    check_mix,
    check_numbers,
    choose_config,
    compare_ranks,
    with_buckets,
)
from dearmpi.plan.data.local_schedule import LocalSchedule

LOCAL = "local"  # the key of a state dict beside torch's own two
_MOST_FRAGMENTS, _MOST_DELAY, _MIX = 8, 5, 0.5


@dataclass(frozen=True, slots=True)
class Merge:
    """An exchange under way: the parameters, and the step after which its result is merged."""

    names: tuple[str, ...]
    due: int


class LocalOptimizer(Readings):
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
        outer_momentum: float = 0.9,
        fragments: int | None = None,
        delay: int | None = None,
        mix: float | None = None,
        compress: Compress | None = None,
        sync_after: int = 0,
        world: World | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """Rank 0's parameters and buffers are copied to all ranks (collective).

        fragments: None: 8, or as many as ``sync_every`` and the model's buckets allow.
        delay: None: 5, or as many steps as the schedule allows.
        mix: the part of its own values that a rank keeps at a merge; None: 0.5, without delay 0.
        compress: of what is exchanged, as in ``EngineConfig``; None: ``int4``, for parameters in
            host memory.
        sync_after: steps at the start in which gradients are averaged as by DistributedOptimizer.
        config: other settings of the exchange.

        Raises ConfigError for what cannot be served, MismatchError where ranks differ.
        """
        check_arguments(inner, model, None)
        check_numbers(sync_every, sync_after, outer_lr, outer_momentum)
        if fragments is not None or delay is not None:
            LocalSchedule(
                sync_every, 1 if fragments is None else fragments, 0 if delay is None else delay
            )
        config = choose_config(config, compress, inner)
        super().__init__(inner.param_groups, inner.defaults)
        self._optimizer, self._model = inner, model
        self.world = choose_world(world)
        given = f"LocalOptimizer({sync_every=}, {outer_lr=}, {outer_momentum=}, {fragments=}, "
        given += f"{delay=}, {mix=}, compress={config.compress!r}, {sync_after=})"
        compare_ranks(self.world, given)
        names = optimized_parameters(inner, model)
        self._trained = {name: param for param, name in names.items() if _is_number(param)}
        config = with_buckets(config, fragments, self._trained.values(), self.world.size)
        broadcast_buffers(model, self.world)
        broadcast_parameters(model, self.world)
        self._anchor = Anchor(
            self._trained, world=self.world, lr=outer_lr, momentum=outer_momentum, config=config
        )
        try:
            self._plan(sync_every, fragments, delay, mix)
            self._dense = _dense_phase(inner, model, self.world, sync_after)
        except BaseException:
            self._anchor.close()
            raise
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

        ``more``: ``sync_after``, ``world``, ``config`` and ``compress``.
        """
        settings: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "fragments": 1}
        settings |= {"delay": 0, "mix": 0.0, "compress": "none"}
        for name in more:
            if name in settings and name != "compress":
                raise ConfigError(
                    f"average() has no {name}, which it sets itself; call LocalOptimizer()",
                    code="settings-contradict",
                )
        return cls(inner, model, sync_every=sync_every, **settings | more)

    @property
    def outer(self) -> DistributedOptimizer:
        """The optimizer of the shared values; its param groups hold the outer learning rate."""
        return self._anchor.outer

    @property
    def is_dense(self) -> bool:
        """Whether gradients are still averaged in each step, before ``sync_after`` steps."""
        return self._dense is not None

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
            self._optimizer.step()
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

    @untraced
    def synchronize(self) -> None:
        """Wait for the exchange under way; its result is merged at its step all the same."""
        if self._dense is not None:
            self._dense.synchronize()
        self._anchor.wait()

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
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state in torch's form, and what local steps need (collective).

        It has this rank's parameters as well: save it on every rank to resume bit for bit.
        """
        return self._save(self._pack)

    def shared_values(self) -> dict[int, Tensor]:
        """By ``id`` of a parameter, what all ranks share of it: what a checkpoint shows."""
        if self._dense is not None:
            return {}
        shared = self._anchor.shared
        return {id(param): shared[name].detach() for name, param in self._trained.items()}

    @untraced
    def local_state(self) -> LocalState:
        """What this rank has of its own, and its share of the outer optimizer's state; the tensors
        are those that the next step changes.
        """
        self.synchronize()
        if self._dense is not None:
            return self._dense.local_state()
        outer, groups = self.outer.local_state(), self._optimizer.state_dict()["param_groups"]
        own = pieces_of_rank(self._trained, self._optimizer.state, rank=self.world.rank)
        return LocalState(
            groups, as_outer(outer.whole), own + pieces_of_outer(outer), as_outer(outer.owned)
        )

    def progress(self) -> dict[str, Any]:
        """Plain data that ``load_local_state`` needs, the same on all ranks."""
        merges = self._under_way
        return {
            "num_steps": self.num_steps,
            "is_local": self._dense is None,
            "world_size": self.world.size,
            "merges": None if merges is None else {"names": list(merges.names), "due": merges.due},
        }

    def load_local_state(self, state_dict: dict[str, Any], progress: Mapping[str, Any]) -> None:
        """Go on from what all ranks have saved by ``local_state`` (collective).

        The model must have the shared values, and must have had them when this optimizer was made.
        Where there were other numbers of ranks, all go on from them, with the mean of the inner
        optimizers' state, and a warning says so.
        """
        inner, local = join_entries(
            state_dict,
            self._optimizer.param_groups,
            self._trained,
            rank=self.world.rank,
            size=int(progress["world_size"]),
            is_own=int(progress["world_size"]) == self.world.size,
        )
        anchor, outer = _copies(self._anchor.shared), self.outer.state_dict()
        local |= {**progress, "rank": self.world.rank, "anchor": anchor}
        local["parameters"] = anchor | local["parameters"]
        local["outer"] = {**outer, "state": local["outer"]}
        self.load_state_dict({**inner, LOCAL: local})

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this rank, and of the same step on every rank (collective).

        Where it was saved on another number of ranks, or by another rank, every rank goes on from
        the shared values, and a warning says so. Raises CheckpointError for a state without local
        steps or of another model, MismatchError if ranks load states of different steps.
        """
        self._load(state_dict, self._take_over)

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
            self._anchor.close()

    def _switch(self, mode: str) -> None:
        getattr(self._optimizer, mode)()

    def _plan(
        self, sync_every: int, fragments: int | None, delay: int | None, mix: float | None
    ) -> None:
        """Settle the schedule by the number of buckets."""
        num_buckets = sum(bucket.trained for bucket in self.outer.layout)
        if fragments is None:
            fragments = max(1, min(_MOST_FRAGMENTS, sync_every // (1 + (delay or 0)), num_buckets))
        if delay is None:
            delay = min(_MOST_DELAY, LocalSchedule.most_delay(sync_every, fragments))
        self.exchanges = LocalSchedule(sync_every, fragments, delay)
        self.mix = check_mix((_MIX if delay else 0.0) if mix is None else mix, delay)
        self.fragments = self._anchor.fragments(fragments)

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

    def _end_dense(self) -> None:
        """From now on every rank has the whole state, and trains by itself."""
        assert self._dense is not None
        self._dense.close()
        self._dense = None
        self._anchor.reset()
        self._show()

    def _show(self) -> None:
        self._share(None, lambda param: "...")
        if self._dense is not None:
            vars(self)["state"] = self._dense.state

    def _pack(self) -> dict[str, Any]:
        self.synchronize()
        inner = self._dense.state_dict() if self._dense is not None else self._inner_state()
        inner[LOCAL] = self.progress() | {
            "rank": self.world.rank,
            "parameters": _copies(self._trained),
            "anchor": _copies(self._anchor.shared if self._dense is None else self._trained),
            "outer": self.outer.state_dict(),
        }
        return inner

    def _inner_state(self) -> dict[str, Any]:
        return dict(self._optimizer.state_dict())

    @torch.no_grad()
    def _take_over(self, state_dict: dict[str, Any]) -> None:
        self._refuse_closed("load_state_dict()")
        local = self._read_local(state_dict)
        saved_by = (int(local["world_size"]), int(local["rank"]))
        is_own = saved_by == (self.world.size, self.world.rank)
        step = f"a state of step {local['num_steps']}"
        compare_ranks(self.world, step, code="ranks-loaded-different-states")
        has_own_state = bool(local.get("is_local")) and bool(state_dict["state"])
        # Of an inner optimizer some ranks may have no state: all refuse, or none.
        foreign, own_state = self.world.all_reduce([not is_own, has_own_state], "max")
        is_own = not foreign
        self.synchronize()
        self._refuse_other_phase(int(local["num_steps"]), own_state > 0)
        self.num_steps = int(local["num_steps"])
        if self._dense is not None and self.num_steps >= self.sync_after:
            self._dense.close()
            self._dense = None
        inner = {key: value for key, value in state_dict.items() if key != LOCAL}
        (self._dense or self._optimizer).load_state_dict(inner)
        for name, shared in self._anchor.shared.items():
            shared.copy_(local["anchor"][name])
        self.outer.load_state_dict(local["outer"])
        own = local["parameters" if is_own and not self.is_dense else "anchor"]
        for name, param in self._trained.items():
            param.copy_(own[name])
        merges = local["merges"] if is_own else None
        self._under_way = None if merges is None else Merge(tuple(merges["names"]), merges["due"])
        self._show()
        if not is_own and not self.is_dense and self.world.is_root:
            warnings.warn(
                f"the state was saved by rank {saved_by[1]} of {saved_by[0]} and is loaded on "
                f"{self.world.size} ranks: all ranks go on from the shared values of step "
                f"{self.num_steps}; what they learned since the last exchange is lost",
                stacklevel=4,
            )

    def _read_local(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        local = state_dict.get(LOCAL)
        if local is None:
            raise CheckpointError(
                "the state has no part of local steps; load what state_dict() of a LocalOptimizer "
                "returned",
                code="state-of-other-model",
            )
        for name, param in self._trained.items():
            saved = local["anchor"].get(name)
            if saved is None or saved.shape != param.shape:
                raise CheckpointError(
                    f"the state has {'no' if saved is None else 'another'} parameter {name}; load "
                    "the state of this model",
                    code="state-of-other-model",
                )
        return dict(local)

    def _refuse_other_phase(self, num_steps: int, has_own_state: bool) -> None:
        """Raise CheckpointError for a state that the phase of its step cannot take up."""
        is_dense = num_steps < self.sync_after
        if is_dense and self._dense is None:
            raise CheckpointError(
                f"the state is of step {num_steps}, of the dense phase, which ended here at step "
                f"{self.sync_after}; load it into a new LocalOptimizer",
                code="state-of-other-model",
            )
        if is_dense and has_own_state:
            raise CheckpointError(
                f"the state is of step {num_steps} and of ranks that trained alone, each with an "
                f"inner optimizer's state of its own, but sync_after "
                f"is {self.sync_after} here; give sync_after={num_steps} or fewer",
                code="state-of-other-model",
            )

    def _refuse_closed(self, what: str) -> None:
        if self._is_closed:
            raise UsageError(
                f"{what} after close(): this LocalOptimizer exchanges nothing any more; make "
                "a new one",
                code="optimizer-closed",
            )


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


def _is_number(param: nn.Parameter) -> bool:
    return param.is_floating_point() or param.is_complex()


def _copies(params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}
