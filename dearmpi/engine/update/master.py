"""What the optimizer works on: a shard of a bucket, and master copies behind rounded parameters.

- ``ResidentShard``: where the bucket is.
- ``HostShard``: of a device, in pinned host memory, where the optimizer steps on the CPU. Before a
  step gradients and parameters are copied here, and after it the parameters back. For the first the
  progress thread waits, by polling; for the second nobody does.
- ``MasterCopy``: the optimizer's own values of parameters that replicas see rounded. Either the
  parameters are of half precision themselves, or they travel in it or compressed: small updates add
  up in the copy that rounding would lose.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.config import EngineConfig
from dearmpi.device.accelerator import Device, DeviceEvent, failures_of
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.device.routes import PinnedPieces, as_rows
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.errors import CheckpointError

MASTER = "master"  # the copy's name among the optimizer's state entries
SHOWN = "shown"  # what replicas of a compressed parameter show of the copy
OWED = "owed"  # averages that count in the next step, since ranks had not sent them

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterCopy:
    """A copy of ``stored`` in fp32, or in a wider dtype of its own.

    values: what the optimizer changes; without memory until the first step, which what is frozen
        never takes. stepped: whether it has; before, the copy means nothing.
    shown: where it is kept what replicas show, if that does not follow from ``values``.
    """

    def __init__(
        self, stored: Tensor, seen_as: torch.dtype, *, shown: Tensor | None = None
    ) -> None:
        """``seen_as``: the dtype to which replicas see ``values`` rounded, without ``shown``."""
        self._stored, self._seen_as, self.shown = stored, seen_as, shown
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
        seen = self.shown
        if seen is None:
            seen = self.values.to(self._seen_as).to(self._stored.dtype)
        # Looking whether there are any is cheaper on the host; a device has to be waited for.
        if seen.device.type != "cpu" or not torch.equal(seen, self._stored):
            self.values.copy_(torch.where(seen != self._stored, self._stored, self.values))

    def publish(self) -> None:
        """Put the values where they are stored, or gathered from, and rounded."""
        self._stored.copy_(self.values)
        self.stepped = True

    def entries(self) -> dict[str, Tensor]:
        """What belongs to the optimizer's state; nothing before the first step."""
        if not self.stepped:
            return {}
        return {MASTER: self.values} | ({} if self.shown is None else {SHOWN: self.shown})

    def restore(self, state: MutableMapping[str, Any]) -> None:
        """Take ``entries`` of before out of ``state``; without, go on with what is stored."""
        saved, shown = state.pop(MASTER, None), state.pop(SHOWN, None)
        self.stepped = saved is not None
        if saved is not None:
            self._allocate()
            self.values.copy_(saved)
            if self.shown is not None:
                self.shown.copy_(shown)

    def _allocate(self) -> None:
        storage = self.values.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._nbytes)


@dataclass(frozen=True, slots=True)
class MasterRule:
    """Which tensors of an optimizer have master copies.

    weights: those of half precision. gathered_as: a dtype in which wider ones are gathered, which
    have one as well; None if they are gathered as they are, or not at all. compressed: names of
    parameters that are gathered compressed.
    """

    weights: bool = False
    gathered_as: torch.dtype | None = None
    compressed: frozenset[str] = frozenset()

    @classmethod
    def chosen_by(
        cls, config: EngineConfig, *, world_size: int, compressed: Iterable[str]
    ) -> MasterRule:
        """By the settings: the host works in fp32, and one rank gathers nothing.

        compressed: names of parameters.
        """
        gathered_as = None
        if config.wire_dtype is not None and config.gather == "parameters" and world_size > 1:
            gathered_as = HALVES[config.wire_dtype]
        weights = config.master_weights or config.update_on == "host"
        return cls(weights, gathered_as, frozenset(compressed))

    @property
    def is_for_wide(self) -> bool:
        """Whether parameters of full precision may have copies."""
        return self.gathered_as is not None or bool(self.compressed)

    def seen_as(self, stored: Tensor) -> torch.dtype | None:
        """The dtype to which replicas see ``stored`` rounded; None if it needs no copy."""
        if is_half(stored):
            return stored.dtype if self.weights else None
        return self.gathered_as if stored.is_floating_point() else None

    def copy_of(self, stored: Tensor, *, shown: Tensor | None = None) -> MasterCopy | None:
        """A new master copy, if ``stored`` needs one. ``shown``: as in ``MasterCopy``."""
        if shown is not None:
            return MasterCopy(stored, stored.dtype, shown=shown)
        seen_as = self.seen_as(stored)
        return None if seen_as is None else MasterCopy(stored, seen_as)

    def settle(self, stored: Tensor, state: MutableMapping[str, Any], name: str) -> None:
        """Make a parameter fit the master copy in its loaded ``state``, and drop a copy that is
        not needed here.

        Elements that show the copy rounded, to whichever dtype, show it as they would here from now
        on. So no digit is lost where a run goes on in another ``comm_dtype``. Others have been
        changed since, and count more. Raises CheckpointError for a copy of another shape.
        """
        master, shown = state.get(MASTER), state.pop(SHOWN, None)
        if master is None:
            return
        for kept in (master, master if shown is None else shown):
            if kept.shape == stored.shape:
                continue
            raise CheckpointError(
                f"the master copy of parameter {name} has shape {tuple(kept.shape)}, but the "
                f"parameter has shape {tuple(stored.shape)}; load the state of this model",
                code="state-of-other-model",
            )
        seen_as = self.seen_as(stored)
        if not is_half(stored):
            master = master.to(stored.device)
            if shown is not None:
                shows = stored == shown.to(stored.device)
            else:
                rounded = [master.to(half).to(stored.dtype) for half in HALVES.values()]
                shows = (stored == rounded[0]) | (stored == rounded[1])
            if name in self.compressed:
                state[MASTER] = torch.where(shows, master, stored)
                state[SHOWN] = stored.clone()
                return
            seen = master if seen_as is None else master.to(seen_as).to(stored.dtype)
            stored.copy_(torch.where(shows, seen, stored))
        if seen_as is None:
            del state[MASTER]


class LeftOver:
    """Digits of a copy whose parameter is no longer gathered compressed, as in a smaller bucket.

    Replicas show it rounded until its next step, which takes the digits up.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def entries(self) -> dict[str, Tensor]:
        """As those of the copy; nothing once they are taken up."""
        return dict(self._kept)

    def restore(self, state: MutableMapping[str, Any]) -> None:
        """Take the entries of a copy out of ``state``, if it has any."""
        master, shown = state.pop(MASTER, None), state.pop(SHOWN, None)
        self._kept = {} if master is None or shown is None else {MASTER: master, SHOWN: shown}

    def take_up(self, stored: Tensor) -> None:
        """Put the digits into ``stored``, but for elements that a script has changed since."""
        if self._kept:
            rounded = stored == self._kept[SHOWN]
            stored.copy_(torch.where(rounded, self._kept[MASTER], stored))
            self._kept = {}


def dtype_of_copy(stored: Tensor) -> torch.dtype:
    """That of a master copy of ``stored``."""
    return torch.promote_types(stored.dtype, torch.float32)


def is_half(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a 16-bit floating-point type."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


NUM_FETCHED = 2  # shards at once: the optimizer works on one while the next is on its way


class Shard(Protocol):
    """1-D tensors, without padding; the last ranks may own none.

    start: the first element, in the bucket's flat buffer.
    parameters: the stored values; what a step writes here, ``send_back`` makes the bucket's.
    shown: of compressed parameters, where it is kept what replicas show of them.
    """

    start: int
    parameters: Tensor
    shown: Tensor | None

    @property
    def gradients(self) -> Tensor:
        """The averages, once what ``start_fetch`` began is complete."""
        ...

    def start_fetch(self) -> Request:
        """Bring parameters and reduced gradients here."""
        ...

    def send_back(self) -> None:
        """Queue the way back of the parameters."""
        ...


class ResidentShard:
    """A part of the bucket's flat buffers, which stays there."""

    def __init__(self, bucket: BucketRuntime, *, rank: int) -> None:
        assert bucket.parameters is not None
        self.start, _ = bucket.spec.shard_range(rank)
        self.parameters, self.shown = bucket.parameters.shard, bucket.shown
        self._bucket = bucket

    @property
    def gradients(self) -> Tensor:
        """Of a buffer that is made when the first gradient is expected."""
        return self._bucket.gradients.shard

    def start_fetch(self) -> Request:
        """Everything is here."""
        return Completed()

    def send_back(self) -> None:
        """Everything is there."""


class HostMemory:
    """What all host shards share.

    comm_stream: what is there once all that is queued here is done is fetched, and sent back to.
    out: the stream of the copies to the host. pieces: room for ``NUM_FETCHED`` shards' gradients.
    """

    def __init__(self, comm_stream: DeviceCommStream, *, most_bytes: int) -> None:
        """``most_bytes``: of the largest shard. Raises DeviceError if that cannot be pinned."""
        self.comm_stream, self.out = comm_stream, comm_stream.device.new_stream()
        self.pieces = PinnedPieces(comm_stream.device, num=NUM_FETCHED, nbytes=most_bytes)


class HostShard:
    """``Shard`` of a bucket on a device.

    parameters: old values, until the fetch; other changes go to the bucket.
    """

    def __init__(self, bucket: BucketRuntime, *, rank: int, memory: HostMemory) -> None:
        """Raises DeviceError if there is no pinned memory for the parameters."""
        assert bucket.parameters is not None
        self.start, _ = bucket.spec.shard_range(rank)
        self._bucket, self._memory = bucket, memory
        self._there = bucket.parameters.shard
        pinned = memory.comm_stream.device.new_pinned(self._there.nbytes)
        self.parameters = pinned.view(self._there.dtype)
        self.shown: Tensor | None = None  # what is on a device is not compressed
        self._piece: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """Until ``send_back``."""
        assert self._piece is not None, "no gradients were fetched"
        return as_rows(self._piece, self._there.dtype, rows=1, columns=self._there.numel())[0]

    def start_fetch(self) -> Request:
        """Queue the copies."""
        memory, device = self._memory, self._memory.comm_stream.device
        self._piece = memory.pieces.take()
        with failures_of(device):
            memory.out.wait_event(memory.comm_stream.mark())
            for source, room in (
                (self._bucket.gradients.shard, self.gradients),
                (self._there, self.parameters),
            ):
                device.copy(source, into=room, stream=memory.out)
            return Fetch(device, memory.out.record_event())

    def send_back(self) -> None:
        """Queue the copy; the next fetch waits for it on the device."""
        assert self._piece is not None, "no gradients were fetched"
        with failures_of(self._memory.comm_stream.device):
            self._memory.comm_stream.copy(self.parameters, into=self._there)
        self._memory.pieces.give_back(self._piece)
        self._piece = None


class Fetch(Request):
    """Copies under way to the host, as a request that is complete when they are."""

    def __init__(self, device: Device, event: DeviceEvent) -> None:
        self._device, self._event = device, event

    def test(self) -> bool:
        """Raises CommError if the device has failed."""
        with failures_of(self._device):
            return self._event.query()
