"""The update of the shard that a rank owns: optimizer work and state are 1/P. The updates of all
buckets are an ``UpdateSet``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.api.collectives import Request
from dearmpi.config import EngineConfig
from dearmpi.device.comm_stream import CommStream, DeviceCommStream, HostCommStream
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.update.master import (
    NUM_FETCHED,
    OWED,
    HostMemory,
    HostShard,
    LeftOver,
    MasterRule,
    ResidentShard,
    Shard,
)
from dearmpi.engine.update.update import (
    Options,
    WholeUpdate,
    beside,
    clone,
    cut,
    is_elementwise_tensor,
    on_host,
    step_on,
)


class ParamRange(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat buffer, of the parameter in ``slot``."""

    slot: int
    start: int
    stop: int


class FusedRange:
    """Neighbouring elements of a shard that one optimizer treats as a single 1-D tensor.

    start, stop: the elements of the flat buffer; range: those of the shard. pieces: the same,
    parameter by parameter.
    """

    def __init__(
        self,
        shard: Shard,
        group: int,
        pieces: Sequence[ParamRange],
        *,
        masters: MasterRule,
    ) -> None:
        self.group = group
        self.pieces = tuple(pieces)
        self._shard = shard
        self.start, self.stop = pieces[0].start, pieces[-1].stop
        self.range = slice(self.start - shard.start, self.stop - shard.start)
        self.values = shard.parameters[self.range]
        shown = None
        if shard.shown is not None and masters.compressed:  # else nothing is lost
            shown = shard.shown[self.range]
        self.master = masters.copy_of(self.values, shown=shown)
        self.left = LeftOver()
        if self.master is not None:
            self.values = self.master.values

    @property
    def gradients(self) -> Tensor:
        """Averaged gradients of the elements, in the dtype of the values."""
        return self._shard.gradients[self.range].to(self.values.dtype)

    @property
    def slots(self) -> frozenset[int]:
        """The slots that have elements here."""
        return frozenset(piece.slot for piece in self.pieces)


class ShardUpdate:
    """The optimizer on the elements of a bucket that this rank owns; state is 1/P.

    slots: of the parameters that may be cut; all of the bucket, but for those of an owner.

    Neighbouring parameters of one group are one tensor to the optimizer, until one of them goes
    without gradient: from then on each is its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: BucketRuntime,
        group_of: Mapping[nn.Parameter, int],
        *,
        shard: Shard,
        masters: MasterRule,
        scalars: Sequence[frozenset[str]],
        slots: Collection[int] | None = None,
    ) -> None:
        """``scalars``: by group, names of scalar entries of the state that lie where the
        optimizer works, if that is a device.
        """
        self.bucket = bucket
        self.slots = frozenset(range(len(bucket.params)) if slots is None else slots)
        self._shard, self._masters, self._scalars = shard, masters, scalars
        self.runs: list[FusedRange] = []
        self._optimizer = clone(optimizer, [], defaultdict(dict))
        first, last = shard.start, shard.start + len(shard.parameters)
        pieces: list[ParamRange] = []
        for slot, placed in enumerate(bucket.spec.placements):
            start, stop = max(first, placed.start), min(last, placed.stop)
            if start >= stop or slot not in self.slots:
                continue
            group = group_of[bucket.params[slot]]
            follows = bool(pieces) and pieces[-1].stop == start
            if pieces and not (follows and group_of[bucket.params[pieces[-1].slot]] == group):
                self._add_run(pieces, group_of)
                pieces = []
            pieces.append(ParamRange(slot, start, stop))
        if pieces:
            self._add_run(pieces, group_of)

    @property
    def device(self) -> torch.device:
        """Where the optimizer works, and its state is."""
        return self._shard.parameters.device

    def start_fetch(self) -> Request:
        """As the shard does."""
        return self._shard.start_fetch()

    @torch.no_grad()
    def step(self, options: Options, unused: frozenset[int]) -> None:
        """Update the own shard, except for ``unused`` slots."""
        if unused:
            self.split()
        if self.device.type == "cpu":
            options = [on_host(group) for group in options]
        members: dict[int, list[Tensor]] = {}
        for run in self.runs:
            if unused.intersection(run.slots):
                if self.bucket.keeps_unused:
                    self._keep_unused(run)
                continue
            if run.master is not None:
                run.master.refresh()
            run.left.take_up(run.values)
            run.values.grad = run.gradients
            if self.bucket.counts_owed:
                assert self.bucket.owed is not None
                self.bucket.owed[run.range] = 0.0
            members.setdefault(run.group, []).append(run.values)
        if self._shard.shown is not None:  # before it is changed, of what has no gradient as well
            self._shard.shown.copy_(self._shard.parameters)
        step_on(self._optimizer, options, members)
        for run in self.runs:
            if run.master is not None and not unused.intersection(run.slots):
                run.master.publish()
        if self.bucket.counts_owed and not unused:
            self.bucket.owed = None
        self._shard.send_back()

    def _keep_unused(self, run: FusedRange) -> None:
        """What ranks had not sent of a parameter may come when none of them uses it."""
        gradients = run.gradients
        if bool(gradients.any()):
            if self.bucket.owed is None:
                self.bucket.owed = torch.zeros_like(self._shard.parameters)
            self.bucket.owed[run.range] = gradients  # with what was owed before

    def split(self) -> None:
        """Make every slot a run of its own; the optimizer's state is cut accordingly."""
        if all(len(run.pieces) == 1 for run in self.runs):
            return
        runs = []
        for run in self.runs:
            state = self.state_of(run)
            self.set_state(run, {})
            for piece in run.pieces:
                part = self._make_run(run.group, [piece])
                runs.append(part)
                start, stop = piece.start - run.start, piece.stop - run.start
                self.set_state(part, cut(state, run.values, start, stop))
        self.runs = runs

    def merge(self) -> None:
        """Join neighbouring runs of one group whose state has the same entries and scalars."""
        runs: list[FusedRange] = []
        for run in self.runs:
            if not runs or not self._can_join(runs[-1], run):
                runs.append(run)
                continue
            before = runs.pop()
            first, second = self.state_of(before), self.state_of(run)
            state = {
                key: torch.cat([value, second[key]])
                if is_elementwise_tensor(value, before.values)
                else value
                for key, value in first.items()
            }
            for old in (before, run):
                self.set_state(old, {})
            joined = self._make_run(run.group, [*before.pieces, *run.pieces])
            self.set_state(joined, state)
            runs.append(joined)
        self.runs = runs

    def state_of(self, run: FusedRange) -> dict[str, Any]:
        """The optimizer's state of ``run``: 1-D tensors of its length, and scalars.

        A master copy stands among them under its own name, once it has taken a step; so does what
        the bucket owes.
        """
        state: dict[str, Any] = self._optimizer.state.get(run.values, {})
        if self.bucket.owed is not None:
            state = {**state, OWED: self.bucket.owed[run.range].clone()}
        copy = run.left if run.master is None else run.master
        return {**state, **copy.entries()}

    def set_state(self, run: FusedRange, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of ``run``."""
        if self.device.type == "cpu":
            state = on_host(state)
        else:
            state = beside(state, run.values, self._scalars[run.group])
        self._set_owed(run, state.get(OWED))
        state = {key: value for key, value in state.items() if key != OWED}
        copy = run.left if run.master is None else run.master
        copy.restore(state)
        if state:
            self._optimizer.state[run.values] = state
        else:
            self._optimizer.state.pop(run.values, None)

    def _set_owed(self, run: FusedRange, owed: Tensor | None) -> None:
        if owed is None and self.bucket.owed is None:
            return
        if self.bucket.owed is None:
            self.bucket.owed = torch.zeros_like(self._shard.parameters)
        self.bucket.owed[run.range] = 0.0 if owed is None else owed

    def _make_run(self, group: int, pieces: Sequence[ParamRange]) -> FusedRange:
        return FusedRange(self._shard, group, pieces, masters=self._masters)

    def _can_join(self, first: FusedRange, second: FusedRange) -> bool:
        if first.group != second.group or first.stop != second.start:
            return False
        left, right = self.state_of(first), self.state_of(second)
        return left.keys() == right.keys() and all(
            _can_be_one(value, right[key], first.values, second.values)
            for key, value in left.items()
        )

    def _add_run(self, pieces: list[ParamRange], group_of: Mapping[nn.Parameter, int]) -> None:
        group = group_of[self.bucket.params[pieces[0].slot]]
        self.runs.append(self._make_run(group, pieces))


def _can_be_one(left: Any, right: Any, first: Tensor, second: Tensor) -> bool:
    """Whether an entry of ``first`` and one of ``second``, its neighbour, go on in each other, or
    are the same scalar.
    """
    if is_elementwise_tensor(left, first):
        return is_elementwise_tensor(right, second) and bool(left.dtype == right.dtype)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and bool(left == right)


class OwnedUpdate(WholeUpdate):
    """The optimizer on the whole parameters that this rank owns; nobody else has their state.

    Gradients and parameters lie in the own shard of the bucket, whose cuts leave them whole. What
    else lies there is ``rest``, of parameters that may be cut.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: BucketRuntime,
        group_of: Mapping[nn.Parameter, int],
        *,
        rank: int,
        whole: Collection[str],
        masters: MasterRule,
        scalars: Sequence[frozenset[str]],
    ) -> None:
        """whole: names of the parameters that are not cut. scalars: as in ``WholeUpdate``."""
        names = enumerate(bucket.spec.names)
        rest = frozenset(slot for slot, name in names if name not in whole)
        owned = [slot for slot in bucket.spec.owned_slots(rank) if slot not in rest]
        super().__init__(optimizer, bucket, group_of, masters=masters, scalars=scalars, slots=owned)
        shard = ResidentShard(bucket, rank=rank)
        self.rest = ShardUpdate(
            optimizer, bucket, group_of, shard=shard, masters=masters, scalars=scalars, slots=rest
        )

    def step(self, options: Options, unused: frozenset[int]) -> None:
        """Update what lies in the own shard, except for ``unused`` slots."""
        self.rest.step(options, unused)
        super().step(options, unused)


Updates = Sequence[ShardUpdate] | Sequence[WholeUpdate]


def shards_of(updates: Updates) -> list[ShardUpdate]:
    """Those of parameters that may be cut; none where every rank updates all."""
    found = [u.rest if isinstance(u, OwnedUpdate) else u for u in updates]
    return [update for update in found if isinstance(update, ShardUpdate)]


def wholes_of(updates: Updates) -> list[WholeUpdate]:
    """All of them where they are of whole parameters, whose state every rank has; else none."""
    return [update for update in updates if type(update) is WholeUpdate]


def owned_of(updates: Updates) -> list[OwnedUpdate]:
    """All of them where parameters have owners, else none."""
    return [update for update in updates if isinstance(update, OwnedUpdate)]


@dataclass(frozen=True, slots=True)
class UpdateSet:
    """The updates of all buckets, and what they share.

    of_buckets: none where the wrapped optimizer does its work itself, as in a world of one.
    masters: which tensors have master copies. comm_stream: where updates run, and where their state
    may be changed. on_host: whether the optimizer works in host memory, for a device.
    """

    of_buckets: Updates = ()
    masters: MasterRule = MasterRule()
    comm_stream: CommStream = HostCommStream()
    on_host: bool = False

    @property
    def shards(self) -> list[ShardUpdate]:
        """The updates of parameters that may be cut, else none."""
        return shards_of(self.of_buckets)

    @property
    def owned(self) -> list[OwnedUpdate]:
        """The updates where parameters have owners, else none."""
        return owned_of(self.of_buckets)

    @property
    def is_divided(self) -> bool:
        """Whether each rank holds another part of the state."""
        return bool(self.shards or self.owned)

    @property
    def num_at_once(self) -> int:
        """How many may be under way, of which all but one are fetching."""
        return NUM_FETCHED if self.on_host else 1


def build_updates(
    optimizer: Optimizer,
    buckets: Sequence[BucketRuntime],
    *,
    rank: int,
    config: EngineConfig,
    comm_stream: CommStream,
    scalars: Sequence[frozenset[str]],
    whole: Collection[str] = (),
) -> UpdateSet:
    """One update for each bucket: all of shards, or all of whole parameters, of every rank or of
    their owners.

    ``scalars``: as in ``ShardUpdate``; ``whole``: as in ``OwnedUpdate``. Raises DeviceError if host
    memory cannot be pinned.
    """
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    on_host, size = config.update_on == "host", buckets[0].spec.world_size
    lossy = [b for b in buckets if b.shown is not None and config.is_lossy]
    compressed = [name for b in lossy for name in b.spec.names]
    masters = MasterRule.chosen_by(config, world_size=size, compressed=compressed)
    updates: Updates
    if config.gather == "gradients":
        updates = [
            WholeUpdate(optimizer, b, groups, masters=masters, scalars=scalars) for b in buckets
        ]
    elif config.shards == "whole":
        updates = [
            OwnedUpdate(
                optimizer, b, groups, rank=rank, whole=whole, masters=masters, scalars=scalars
            )
            for b in buckets
        ]
    else:
        shards = _place_shards(buckets, rank=rank, comm_stream=comm_stream, on_host=on_host)
        updates = [
            ShardUpdate(optimizer, bucket, groups, shard=shard, masters=masters, scalars=scalars)
            for bucket, shard in zip(buckets, shards, strict=True)
        ]
    return UpdateSet(updates, masters, comm_stream, on_host)


def _place_shards(
    buckets: Sequence[BucketRuntime], *, rank: int, comm_stream: CommStream, on_host: bool
) -> Iterable[Shard]:
    if not on_host:
        return [ResidentShard(bucket, rank=rank) for bucket in buckets]
    assert isinstance(comm_stream, DeviceCommStream), "without a device this is refused"
    most_bytes = max(b.spec.largest_shard * b.spec.itemsize for b in buckets)
    memory = HostMemory(comm_stream, most_bytes=most_bytes)
    return [HostShard(bucket, rank=rank, memory=memory) for bucket in buckets]
