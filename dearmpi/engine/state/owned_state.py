"""State of parameters that one rank owns: gathered from the owners, and sent to new ones.

Any state that torch saves may be in it: numbers, and tensors of any shape, also in lists, tuples
and dictionaries. What travels first is its outline, in which a ``TensorForm`` stands for each
tensor; then the tensors of one rank and dtype, as one buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, PeerMessages, Request
from dearmpi.comm.messages import values
from dearmpi.comm.messages.collective_calls import gather_data
from dearmpi.comm.world import World
from dearmpi.cuts import Cuts
from dearmpi.device.accelerator import through_host
from dearmpi.engine.update.shard_update import OwnedUpdate
from dearmpi.plan.data.layout import BucketLayout

State = dict[str, Any]


class TensorForm(NamedTuple):
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()


def outline(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with forms in place of its tensors, which are added to ``tensors`` in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorForm(tuple(value.shape), value.dtype)
    if type(value) in (list, tuple):
        return type(value)(outline(item, tensors) for item in value)
    if type(value) is dict:
        return {key: outline(item, tensors) for key, item in value.items()}
    return value


def fill_in(outlined: Any, tensors: Iterator[Tensor]) -> Any:
    """What ``outline`` was made of, with ``tensors`` in order."""
    if isinstance(outlined, TensorForm):
        return next(tensors)
    if type(outlined) in (list, tuple):
        return type(outlined)(fill_in(item, tensors) for item in outlined)
    if type(outlined) is dict:
        return {key: fill_in(item, tensors) for key, item in outlined.items()}
    return outlined


def forms_in(outlined: Any) -> Iterator[TensorForm]:
    """The forms, in order."""
    if isinstance(outlined, TensorForm):
        yield outlined
    elif type(outlined) in (list, tuple, dict):
        for item in outlined.values() if type(outlined) is dict else outlined:
            yield from forms_in(item)


def pack(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """All of one dtype in one buffer of the host, one after the other."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor.detach().cpu().reshape(-1))
    return {dtype: torch.cat(by_dtype[dtype]) for dtype in sorted(by_dtype, key=str)}


def room_for(forms: Sequence[TensorForm]) -> dict[torch.dtype, Tensor]:
    """What ``pack`` makes of tensors of these forms, without their values."""
    numels: dict[torch.dtype, int] = defaultdict(int)
    for form in forms:
        numels[form.dtype] += form.numel
    dtypes = sorted(numels, key=str)
    return {dtype: torch.empty(numels[dtype], dtype=dtype, device="cpu") for dtype in dtypes}


def unpack(forms: Sequence[TensorForm], buffers: Mapping[torch.dtype, Tensor]) -> Iterator[Tensor]:
    """The tensors, with memory of their own."""
    ends: dict[torch.dtype, int] = defaultdict(int)
    for form in forms:
        start = ends[form.dtype]
        ends[form.dtype] = start + form.numel
        part = buffers[form.dtype][start : ends[form.dtype]]
        yield part.clone().view(form.shape)


def own_states(updates: Sequence[OwnedUpdate]) -> dict[str, State]:
    """The state that this rank alone holds, by parameter name; the next step changes it."""
    return {name: state for update in updates for name, state in update.states().items()}


def gather_owned(world: World, updates: Sequence[OwnedUpdate]) -> dict[str, State]:
    """The state of all owners, by parameter name, on every rank (collective)."""
    tensors: list[Tensor] = []
    outlined = outline(own_states(updates), tensors)
    whole: dict[str, State] = {}
    for owner, states in enumerate(world.all_gather_object(outlined)):
        forms = list(forms_in(states))
        buffers = pack(tensors) if owner == world.rank else room_for(forms)
        for buffer in buffers.values():
            if buffer.numel():
                world.broadcast(buffer, owner)
        whole |= fill_in(states, unpack(forms, buffers))
    return whole


def gather_shards(world: World, flat: Tensor, cuts: Cuts) -> None:
    """Fill ``flat`` with every rank's shard of it (collective)."""
    if cuts.is_even:
        through_host(flat, world.all_gather)
        return
    for owner in range(world.size):
        if cuts.size_of(owner):
            through_host(flat[cuts.slice_of(owner)], partial(world.broadcast, root=owner))


class OwnedMove:
    """States on their way from the owners by one layout to those by another."""

    def __init__(self, layout: BucketLayout, *, rank: int) -> None:
        """``layout``: the new one."""
        self._rank = rank
        self._owners = {
            bucket.names[slot]: owner
            for bucket in layout
            for owner in range(layout.world_size)
            for slot in bucket.owned_slots(owner)
        }
        self._states: dict[str, State] = {}

    def take(self, updates: Sequence[OwnedUpdate]) -> None:
        """Have the updates, whose last step is over, let go of their state."""
        self._states |= own_states(updates)

    def exchange(self, collectives: Collectives) -> Iterator[Request]:
        """Send and receive (collective)."""
        target_of = self._owners
        leaving: dict[int, list[Tensor]] = defaultdict(list)
        outlined: dict[str, Any] = {}
        for name in sorted(self._states):
            outlined[name] = outline(self._states[name], leaving[target_of[name]])
        origin = f"rank {self._rank} on {collectives.hosts[self._rank]}"
        sent = values.pack(outlined, copies=collectives.size, origin=origin)
        rows = yield from gather_data(collectives, sent)
        arriving: dict[int, dict[str, Any]] = {}
        for source, read in enumerate(values.unpack(rows, reader=origin)):
            if source != self._rank:
                assert isinstance(read, dict)
                arriving[source] = {n: o for n, o in read.items() if target_of[n] == self._rank}
        rooms = {source: room_for(list(forms_in(states))) for source, states in arriving.items()}
        sends = [
            (target, buffer)
            for target, tensors in sorted(leaving.items())
            if target != self._rank
            for buffer in pack(tensors).values()
        ]
        receives = [(source, buffer) for source in rooms for buffer in rooms[source].values()]
        yield PeerMessages(collectives, sends=_filled(sends), receives=_filled(receives))
        self._states = {n: s for n, s in self._states.items() if target_of[n] == self._rank}
        for source, states in arriving.items():
            forms = list(forms_in(states))
            self._states |= fill_in(states, unpack(forms, rooms[source]))

    def deliver(self, updates: Sequence[OwnedUpdate]) -> None:
        """Give the states to ``updates``."""
        for update in updates:
            update.set_states(self._states)


def _filled(buffers: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(rank, buffer) for rank, buffer in buffers if buffer.numel()]
