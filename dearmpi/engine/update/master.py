"""Master copies: the optimizer's own values behind parameters that replicas see rounded.

Either the parameters are of half precision themselves, or they travel in it: small updates add up
in the copy that rounding would lose.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dearmpi.config import EngineConfig
from dearmpi.errors import CheckpointError

MASTER = "master"  # the copy's name among the optimizer's state entries

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterCopy:
    """A copy of ``stored`` in fp32, or in a wider dtype of its own.

    values: what the optimizer changes; without memory until the first step, which what is frozen
        never takes. stepped: whether it has; before, the copy means nothing.
    """

    def __init__(self, stored: Tensor, seen_as: torch.dtype) -> None:
        """``seen_as``: the dtype to which replicas see ``values`` rounded."""
        self._stored, self._seen_as = stored, seen_as
        self.values = torch.empty_like(stored, dtype=dtype_of_copy(stored))
        self._nbytes = self.values.untyped_storage().nbytes()
        self.values.untyped_storage().resize_(0)
        self.stepped = False

    def refresh(self) -> None:
        """Take over elements that somebody else has changed since, as loading a model does."""
        if not self.stepped:
            self._allocate()
            self.values.copy_(self._stored)
            return
        seen = self.values.to(self._seen_as).to(self._stored.dtype)
        # Looking whether there are any is cheaper on the host; a device has to be waited for.
        if seen.device.type != "cpu" or not torch.equal(seen, self._stored):
            self.values.copy_(torch.where(seen != self._stored, self._stored, self.values))

    def publish(self) -> None:
        """Put the values where they are stored, or gathered from, and rounded."""
        self._stored.copy_(self.values)
        self.stepped = True

    def restore(self, saved: Tensor | None) -> None:
        """Go on with the values of an earlier run; without, with what is stored."""
        self.stepped = saved is not None
        if saved is not None:
            self._allocate()
            self.values.copy_(saved)

    def _allocate(self) -> None:
        storage = self.values.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._nbytes)


@dataclass(frozen=True, slots=True)
class MasterRule:
    """Which tensors of an optimizer have master copies.

    weights: those of half precision. gathered_as: a dtype in which wider ones are gathered, which
    have one as well; None if they are gathered as they are, or not at all.
    """

    weights: bool = False
    gathered_as: torch.dtype | None = None

    @classmethod
    def chosen_by(cls, config: EngineConfig, *, world_size: int) -> MasterRule:
        """By the settings: the host works in fp32, and one rank gathers nothing."""
        gathered_as = None
        if config.wire_dtype is not None and config.gather == "parameters" and world_size > 1:
            gathered_as = HALVES[config.wire_dtype]
        return cls(config.master_weights or config.update_on == "host", gathered_as)

    def seen_as(self, stored: Tensor) -> torch.dtype | None:
        """The dtype to which replicas see ``stored`` rounded; None if it needs no copy."""
        if is_half(stored):
            return stored.dtype if self.weights else None
        return self.gathered_as if stored.is_floating_point() else None

    def copy_of(self, stored: Tensor) -> MasterCopy | None:
        """A new master copy, if ``stored`` needs one."""
        seen_as = self.seen_as(stored)
        return None if seen_as is None else MasterCopy(stored, seen_as)

    def settle(self, stored: Tensor, state: MutableMapping[str, Any], name: str) -> None:
        """Make a parameter fit the master copy in its loaded ``state``, and drop a copy that is
        not needed here.

        Elements that show the copy rounded, to whichever dtype, show it as they would here from
        now on, so that no digit is lost where a run goes on in another ``comm_dtype``. Others have
        been changed since, and count more. Raises CheckpointError for a copy of another shape.
        """
        master = state.get(MASTER)
        if master is None:
            return
        if master.shape != stored.shape:
            raise CheckpointError(
                f"the master copy of parameter {name} has shape {tuple(master.shape)}, but the "
                f"parameter has shape {tuple(stored.shape)}; load the state of this model",
                code="state-of-other-model",
            )
        seen_as = self.seen_as(stored)
        if not is_half(stored):
            master = master.to(stored.device)
            shows = [stored == master.to(half).to(stored.dtype) for half in HALVES.values()]
            seen = master if seen_as is None else master.to(seen_as).to(stored.dtype)
            stored.copy_(torch.where(shows[0] | shows[1], seen, stored))
        if seen_as is None:
            del state[MASTER]


def dtype_of_copy(stored: Tensor) -> torch.dtype:
    """That of a master copy of ``stored``."""
    return torch.promote_types(stored.dtype, torch.float32)


def is_half(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a 16-bit floating-point type."""
    return tensor.dtype in (torch.float16, torch.bfloat16)
