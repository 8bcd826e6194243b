"""Saving: the state of local steps, whole in torch's form or as a rank's share of a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.engine.iteration.compilation import untraced
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.readings import Readings
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.errors import CheckpointError, UsageError
from dearmpi.local.anchor import Anchor
from dearmpi.local.rank_state import (
    UNROUNDED,
    as_outer,
    join_entries,
    pieces_of_outer,
    pieces_of_rank,
)
from dearmpi.local.sync_settings import compare_ranks

LOCAL = "local"  # the key of a state dict beside torch's own two


@dataclass(frozen=True, slots=True)
class Merge:
    """An exchange under way: the parameters, and the step after which its result is merged."""

    names: tuple[str, ...]
    due: int


class LocalSaving(Readings):
    """What of a ``LocalOptimizer`` saves its state and takes one up.

    outer: trains the shared values. is_dense: gradients are averaged in each step so far.
    """

    _own_kind = "", ""  # what ``_own_tensors`` are, and how they go on where they do not fit
    world: World
    num_steps: int
    sync_after: int
    _optimizer: Optimizer
    _trained: dict[str, nn.Parameter]
    _anchor: Anchor
    _dense: DistributedOptimizer | None
    _under_way: Merge | None
    _is_closed: bool

    @property
    def outer(self) -> DistributedOptimizer:
        """The optimizer of the shared values; its param groups hold the outer learning rate."""
        return self._anchor.outer

    @property
    def is_dense(self) -> bool:
        """Whether gradients are still averaged in each step, before ``sync_after`` steps."""
        return self._dense is not None

    @untraced
    def synchronize(self) -> None:
        """Wait for the exchange under way; its result is merged at its step all the same."""
        if self._dense is not None:
            self._dense.synchronize()
        self._anchor.wait()

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
        return {
            id(param): shared[name].detach().to(param.dtype)
            for name, param in self._trained.items()
        }

    @untraced
    def local_state(self) -> LocalState:
        """What this rank has of its own, and its share of the outer optimizer's state; the tensors
        are those that the next step changes.
        """
        self.synchronize()
        if self._dense is not None:
            return self._dense.local_state()
        outer, groups = self.outer.local_state(), self._optimizer.state_dict()["param_groups"]
        own = pieces_of_rank(
            self._trained, self._optimizer.state, self._kept_tensors(), rank=self.world.rank
        )
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

        The model must have the shared values. Where there were other numbers of ranks, all go on
        from them, with the mean of the inner optimizers' state, and a warning says so.
        """
        inner, local = join_entries(
            state_dict,
            self._optimizer.param_groups,
            self._trained,
            rank=self.world.rank,
            size=int(progress["world_size"]),
            is_own=int(progress["world_size"]) == self.world.size,
        )
        anchor, outer = _copies(self._trained), self.outer.state_dict()
        local["parameters"] = anchor | local["parameters"]
        anchor |= local.pop("unrounded")
        local |= {**progress, "rank": self.world.rank, "anchor": anchor}
        local["outer"] = {**outer, "state": local["outer"]}
        self.load_state_dict({**inner, LOCAL: local})

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this rank, and of the same step on every rank (collective).

        Where it was saved on another number of ranks, or by another rank, every rank goes on from
        the shared values, with a warning. Raises CheckpointError for a state without local steps or
        of another model, MismatchError if ranks load states of different steps.
        """
        self._load(state_dict, self._take_over)

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
            "own": {name: _copies(tensors) for name, tensors in self._own_tensors().items()},
        }
        return inner

    def _own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """By a parameter's name, what else this rank has of its own, shaped like it."""
        return {}

    def _kept_tensors(self) -> dict[str, dict[str, Tensor]]:
        """As ``_own_tensors``; rank 0 keeps shared values that a half-precision model rounds."""
        kept = self._own_tensors()
        if self.world.is_root:
            for name, shared in self._anchor.shared.items():
                if shared.dtype != self._trained[name].dtype:
                    kept[name] = {**kept.get(name, {}), UNROUNDED: shared.detach()}
        return kept

    def _take_own(self, local: Mapping[str, Any], is_own: bool) -> None:
        """Go on from ``own`` of ``local``, if it is of this rank. On another number of ranks nobody
        knows whose data a rank has: all of it becomes zero, and rank 0 warns.
        """
        own = self._own_tensors()
        for name, tensors in own.items():
            for key, value in tensors.items():
                if is_own:
                    value.copy_(local["own"][name][key])
                else:
                    value.zero_()
        if own and not is_own and self.world.is_root:
            kind, cure = self._own_kind
            warnings.warn(
                f"{kind} of {local['world_size']} ranks do not fit the data of {self.world.size}: "
                f"{cure}",
                stacklevel=6,
            )

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
        self._take_own(local, is_own)
        if not is_own and not self.is_dense and self.world.is_root:
            warnings.warn(
                f"the state was saved by rank {saved_by[1]} of {saved_by[0]} and is loaded on "
                f"{self.world.size} ranks: all ranks go on from the shared values of step "
                f"{self.num_steps}; what they learned since the last exchange is lost",
                stacklevel=4,
            )

    def _read_local(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise CheckpointError, on all ranks, if one of them cannot take up what it is given."""
        local = state_dict.get(LOCAL)
        fault = (
            "the state has no part of local steps; load what state_dict() of a LocalOptimizer "
            "returned"
            if local is None
            else self._fault_of(local)
        )
        for rank, text in enumerate(self.world.all_gather_text(fault)):
            if text:
                raise CheckpointError(f"on rank {rank} {text}", code="state-of-other-model")
        return dict(local or {})

    def _fault_of(self, local: Mapping[str, Any]) -> str:
        """Why a state cannot be taken up, and what to do; empty if it can."""
        for name, param in self._trained.items():
            saved = local["anchor"].get(name)
            if saved is None or saved.shape != param.shape:
                found = "no" if saved is None else "another"
                return f"the state has {found} parameter {name}; load the state of this model"
        return ""

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
                f"the state is of step {num_steps} and of ranks that trained alone, each with its "
                f"own inner optimizer, but sync_after is {self.sync_after} here; give "
                f"sync_after={num_steps} or fewer",
                code="state-of-other-model",
            )

    def _refuse_closed(self, what: str) -> None:
        if self._is_closed:
            raise UsageError(
                f"{what} after close(): this LocalOptimizer exchanges nothing any more; make "
                "a new one",
                code="optimizer-closed",
            )


def _copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}
