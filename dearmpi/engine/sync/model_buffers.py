"""A model's buffers, such as batch normalisation's statistics, made equal on all ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import Buffers
from dearmpi.engine.agreement.join import Joining
from dearmpi.engine.sync.batch_norm import name_layers, refuse_join
from dearmpi.engine.sync.model_tensors import compare_tensors, describe, stored_parts
from dearmpi.engine.sync.refused_models import refuse_unaveraged
from dearmpi.errors import ConfigError

_WINDOW = 8  # messages in flight, which is one exchange of any model
_SPARSE = (torch.sparse_coo, torch.sparse_csr)

Form = tuple[str, torch.Size, torch.dtype, torch.device]
"""Name, shape, data type and device of a tensor that is exchanged."""


class BufferExchange:
    """Makes all buffers of ``model`` those of rank 0, or the average over the ranks, or keeps them.

    Integers, such as counters, are always rank 0's. Inside ``join`` only ranks that still train
    count, of which the last is in rank 0's place, as with DDP.

    before_forward: inside ``join`` they are exchanged before forwards in place of steps.

    An exchange is one message per data type, of the lengths that the ranks have agreed on, and
    beside them a few numbers: whether this rank's buffers are others by now. Only where some are,
    the ranks compare them, and what has arrived is not used.
    """

    def __init__(self, model: nn.Module, world: World, how: Buffers) -> None:
        """``how``: as in ``EngineConfig`` (collective). All ranks must have the same buffers.

        ``SyncBatchNorm`` layers get to know their names, for errors.
        """
        name_layers(model, world)
        self._model, self._how = model, how
        self._rank, self._hosts = world.rank, world.hosts
        self._channel: Channel | None = None
        self._last_news: Callable[[], bool] | None = None
        self._root, self.before_forward = 0, False
        if how != "keep" and world.size > 1:
            self._agree()
            self._channel = world.open_channel("buffers", window=_WINDOW)

    def check_joinable(self) -> None:
        """Raise UsageError for a model of which ranks cannot take unequal numbers of batches."""
        refuse_join(self._model)

    def exchange(self, joining: Joining) -> None:
        """Wait for the other ranks' buffers, if they are wanted (collective).

        Raises MismatchError on all ranks alike, with all buffers as they were, where the ranks have
        other ones; ConfigError for new ones that cannot be sent, or averaged.
        """
        if self._channel is not None:
            self._exchange(self._channel, joining)

    def end_join(self, last: int, joining: Joining) -> None:
        """Inside ``join`` no rank trains any more: the buffers of rank ``last`` count. From now on
        those of the highest rank do, as with DDP (collective).
        """
        self._root = last
        self.exchange(joining)
        self._root = len(self._hosts) - 1

    def close(self) -> None:
        """Give the channel back (collective); no exchange has an effect any more."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._finish_last(channel)
            channel.close()

    @torch.no_grad()
    def _exchange(self, channel: Channel, joining: Joining) -> None:
        self._finish_last(channel)
        # None, too, where all have begun the step before they opened ``join``.
        train = joining.training_ranks() if joining.is_open else []
        ranks, root = train or range(len(self._hosts)), train[-1] if train else self._root
        tensors, counts = self._read_agreed(), self._rank in ranks
        news = self._announce(channel, tensors, counts)
        if tensors is not None and not tensors:
            self._last_news = news  # nothing travels, so this step waits for nobody
            return
        waits = [
            self._begin(channel, self._flatten(kind, tensors), counts, len(ranks), root)
            for kind in self._kinds
        ]
        arrived = [wait() for wait in waits]
        if news():
            self._compare(channel, self._describe())
            self._agree()
            self._exchange(channel, joining)
        elif tensors is not None:
            for kind, flat in zip(self._kinds, arrived, strict=True):
                _spread(flat, [tensors[index] for index in kind])

    def _agree(self) -> None:
        """Exchange this rank's buffers as they are now, which the others have alike."""
        refuse_unaveraged(self._model.named_buffers(), self._how)
        named: list[tuple[str, Tensor]] = []
        self._places: list[int] = []
        for name, buffer in self._model.named_buffers():
            parts = stored_parts(buffer, f"buffer {name}")
            if self._how == "average" and buffer.layout in _SPARSE:
                # The last part has the values, which are averaged only where all lie alike.
                self._places += range(len(named), len(named) + len(parts) - 1)
            named += [(name, part) for part in parts]
        self._agreed, self._kinds = [_form(*pair) for pair in named], _by_kind(named)

    def _read(self) -> list[tuple[str, Tensor]]:
        return [
            (name, part)
            for name, buffer in self._model.named_buffers()
            for part in stored_parts(buffer, f"buffer {name}")
        ]

    def _read_agreed(self) -> list[Tensor] | None:
        """What is exchanged; None where it is not what the ranks have agreed on."""
        try:
            named = self._read()
        except ConfigError:  # for all ranks to raise, once they have compared
            return None
        if [_form(*pair) for pair in named] != self._agreed:
            return None
        return [part for _, part in named]

    def _flatten(self, kind: Sequence[int], tensors: Sequence[Tensor] | None) -> Tensor:
        """The message of one data type, in host memory; nothing of use where there are none."""
        if tensors is not None:
            flat = torch.cat([tensors[index].reshape(-1) for index in kind])
            return flat.resolve_conj().resolve_neg().cpu()
        numel = sum(self._agreed[index][1].numel() for index in kind)
        return torch.zeros(numel, dtype=self._agreed[kind[0]][2], device="cpu")

    def _begin(
        self, channel: Channel, flat: Tensor, counts: bool, num_ranks: int, root: int
    ) -> Callable[[], Tensor]:
        """Send a message; to call what comes back is to wait for what it becomes."""
        is_complex = flat.is_complex()
        if self._how != "average" or not (flat.is_floating_point() or is_complex):
            wait = channel.begin("broadcast of buffers", lambda c: c.start_broadcast(flat, root))
            return lambda: (wait(), flat)[1]
        parts = torch.view_as_real(flat).view(-1) if is_complex else flat
        sums = parts.to(torch.promote_types(parts.dtype, torch.float32))
        if not counts:
            sums.zero_()
        wait = channel.begin("sum of buffers", lambda c: c.start_all_reduce(sums, "sum"))

        def average() -> Tensor:
            wait()
            sums.div_(num_ranks)
            return torch.view_as_complex(sums.view(-1, 2)) if is_complex else sums

        return average

    def _announce(
        self, channel: Channel, tensors: Sequence[Tensor] | None, counts: bool
    ) -> Callable[[], bool]:
        """Say whether this rank's buffers are others than the ranks have agreed on. Call what comes
        back to wait for the answer: whether any rank's are, or sparse ones that are to be added
        have their elements in other places.
        """
        flags = [float(tensors is None), -math.inf, -math.inf]
        if counts and tensors is not None:
            places = _hash_of(tensors[index] for index in self._places)
            flags[1:] = places, -places
        largest = torch.tensor(flags, dtype=torch.float64, device="cpu")
        wait = channel.begin("news of buffers", lambda c: c.start_all_reduce(largest, "max"))

        def news() -> bool:
            wait()
            some_changed, most, of_negatives = largest.tolist()
            return bool(some_changed) or most != -of_negatives

        return news

    def _finish_last(self, channel: Channel) -> None:
        """Raise MismatchError if other ranks have got buffers that this one had not when it last
        sent none.
        """
        news, self._last_news = self._last_news, None
        if news is not None and news():
            self._compare(channel, [])

    def _compare(self, channel: Channel, lines: Sequence[str]) -> None:
        compare_tensors(
            lines,
            lambda text: channel.all_gather_text("comparison of buffers", text),
            hosts=self._hosts,
            what="buffers",
            cure="add, remove, resize and convert buffers alike on every rank, before the same "
            f"step, or leave out buffers={self._how!r}",
        )

    def _describe(self) -> list[str]:
        return [
            f"buffer {name} {describe(buffer, note=self._describe_places(name, buffer))}"
            for name, buffer in self._model.named_buffers()
        ]

    def _describe_places(self, name: str, buffer: Tensor) -> str:
        if self._how != "average" or buffer.layout not in _SPARSE:
            return ""
        return f", its elements in places of hash {_hash_of(stored_parts(buffer, name)[:-1]):08x}"


def _form(name: str, tensor: Tensor) -> Form:
    return name, tensor.shape, tensor.dtype, tensor.device


def _by_kind(named: Sequence[tuple[str, Tensor]]) -> list[list[int]]:
    """The numbers of tensors that fit into one message, in the same order on every rank."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, (_, tensor) in enumerate(named):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` with their elements in ``flat``."""
    parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _hash_of(tensors: Iterable[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.contiguous().cpu().numpy().tobytes(), found)
    return found
