"""The seam between the engine and a message-passing library.

``Collectives`` starts operations and returns ``Request``s; nothing here blocks. Buffers are dense
1-D tensors (torch's, by duck typing: this package does not import torch). The caller keeps a
buffer alive and untouched until its request is complete; the request holds it meanwhile. Requests
may be made of other requests, one after the other or all at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Literal, Protocol, runtime_checkable

from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.errors import CommError, ConfigError
from dearmpi.grid import Grid

ReduceOp = Literal["sum", "max", "min"]


class Buffer(Protocol):
    """What comm needs of a 1-D tensor."""

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    def element_size(self) -> int: ...

    def new_empty(self, size: int, /) -> Any: ...


class Movement(IntEnum):
    """The most important event between two polls."""

    NONE = 0
    MESSAGE = 1  # one of an operation's messages came in
    OPERATION = 2  # an operation, or a step of one, began or ended


class Request(ABC):
    """An operation in flight."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress; True once the operation is complete. Safe to call again after that."""

    @property
    def movement(self) -> Movement:
        """What the last test found, if it did not complete the operation."""
        return Movement.NONE

    @property
    def num_arrived(self) -> int | None:
        """Number of messages that have come in so far; None if unknown."""
        return None

    def when_posted(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the operation is posted: at once, unless it must wait first."""
        call()


class Wrapper(Request):
    """A request that adds to another one, and passes its properties on."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def movement(self) -> Movement:
        return self._request.movement

    @property
    def num_arrived(self) -> int | None:
        return self._request.num_arrived

    def when_posted(self, call: Callable[[], None]) -> None:
        self._request.when_posted(call)


class Collectives(Protocol):
    """Non-blocking operations over one set of ranks.

    Operations of one ``Collectives`` must be started in the same order on every rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host."""
        ...

    def start_reduce_scatter(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid,
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """Sum ``buffer`` over the ranks; this rank's shard of it then holds its shard of the sum.

        The other shards are left undefined.

        algorithm: by name, or on a grid of all ranks, dimension by dimension.
        cuts: the same on every rank; they end where ``buffer`` does, and shards may be empty. None:
        equal shards, of a length that is a multiple of the world size.
        wire_dtype: in what to send a wider buffer; sums are formed in the buffer's own dtype.
        ``exchange`` rounds each rank's contribution once: with u = 2**-8 (bf16) or 2**-11 (fp16)
        an element is off by at most u times the sum of the contributions' magnitudes. ``ring``
        rounds the partial sum at each of P - 1 hops: by at most (1 + u)**(P - 1) - 1 times it.
        A grid rounds it once in each dimension. ``native`` cannot. What fp16 cannot hold becomes
        infinite, or zero.
        """
        ...

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid = "native",
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it, in place.

        cuts: as in ``start_reduce_scatter``.
        algorithm: ``ring``, and ``exchange``, which gathers by a ring, suit large buffers and let
        operations of higher priority pass; ``native`` takes fewer steps for small buffers on many
        ranks.
        wire_dtype: in what to send a wider buffer; the own shard is then rounded as the others
        receive it, so that all ranks hold the same bits. With one rank nothing is rounded.
        """
        ...

    def start_exchange(self, sent: Buffer, arrived: Buffer, *, cuts: Cuts | None = None) -> Request:
        """Send shard r of ``sent`` to rank r; shard r of ``arrived`` is then what rank r sent here.

        cuts: those of ``sent``, as in ``start_reduce_scatter``. ``arrived`` has P shards, each as
        long as the own one of ``sent``. The own shard of ``arrived`` is left as it is.
        """
        ...

    def reserve(self) -> AbstractContextManager[None]:
        """A place in the order of operations, for one that starts within the ``with`` block, later.

        Every rank reserves in the same place. Not for operations of the library itself.
        """
        ...

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        """Reduce ``buffer`` over the ranks, in place."""
        ...

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        """Copy ``buffer`` of ``root`` to every rank, in place."""
        ...

    def start_duplicate(self) -> tuple[Collectives, Request]:
        """A new set over the same ranks with an order of its own; usable once complete."""
        ...

    def make_group(self, ranks: Sequence[int], number: int) -> Collectives:
        """Collectives over some ranks, in this order, which all of them make, and they alone.

        Returns once all are there. number: tells groups apart that are made at the same time.
        """
        ...

    def free(self) -> None:
        """Release a duplicated set, on which no operation is in flight."""
        ...

    def start_message(self, data: bytes, destination: int) -> Request:
        """Send a short message to one rank, outside of all collectives."""
        ...

    def receive_message(self) -> tuple[int, bytes] | None:
        """The next such message that has arrived, with its sender; None if there is none."""
        ...

    def abort(self, code: int) -> None:
        """End the whole job with exit status ``code``."""
        ...


@runtime_checkable
class PointToPoint(Protocol):
    """Sends and receives of whole buffers between two ranks, matched by tag, in order."""

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        """Send ``buffer`` to one rank."""
        ...

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Receive into ``buffer`` from one rank."""
        ...


class Completed(Request):
    """A request that is complete from the start."""

    def test(self) -> bool:
        return True


def check_contiguous(operation: str, buffer: Buffer) -> None:
    """Raise ConfigError unless ``buffer`` is a contiguous tensor."""
    if not hasattr(buffer, "is_contiguous"):
        raise ConfigError(
            f"{operation} of an object of type {type(buffer).__name__}, which is no tensor; call "
            "broadcast_object(x) or all_gather_object(x) for any object",
            code="wrong-type",
        )
    if getattr(buffer, "is_meta", False):
        raise ConfigError(
            f"{operation} of a tensor on the meta device, which has no memory; call to_empty() or "
            "torch.empty_like(x, device='cpu') first",
            code="wrong-type",
        )
    if not buffer.is_contiguous() or _is_lazy(buffer):
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements that are not contiguous in memory; pass a "
            "contiguous copy, and copy the result back",
            code="buffer-not-contiguous",
        )


def _is_lazy(buffer: Any) -> bool:
    """Whether memory holds other values than the tensor shows: conjugates, or those negated."""
    return any(getattr(buffer, name, bool)() for name in ("is_conj", "is_neg"))


def even_shards(operation: str, buffer: Buffer, size: int) -> Cuts:
    """Equal shards of ``buffer`` for ``size`` ranks. Raises ConfigError if there are none."""
    cuts = even_cuts(buffer.numel(), size)
    if cuts.total != buffer.numel():
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements over {size} ranks: the length must be a "
            "multiple of the world size",
            code="buffer-not-divisible",
        )
    return cuts


def shards_of_buffer(operation: str, buffer: Buffer, size: int, cuts: Cuts | None) -> Cuts:
    """``cuts``, or equal shards of ``buffer``. Raises ConfigError for cuts of other lengths."""
    if cuts is None:
        return even_shards(operation, buffer, size)
    if cuts.total != buffer.numel() or cuts.num_ranks != size:
        raise ConfigError(
            f"{operation} of {buffer.numel()} elements over {size} ranks: the cuts are for "
            f"{cuts.total} elements and {cuts.num_ranks} ranks; make them for this buffer",
            code="buffer-not-divisible",
        )
    return cuts


class Chain(Request):
    """The requests of ``steps``, each posted once the one before is complete.

    Posts the first at once. A test advances by one step at most, so that the computation between
    two steps does not delay other operations for long.
    """

    def __init__(self, steps: Iterator[Request]) -> None:
        self._steps = steps
        self._step: Request | None = None
        self._moved = False
        self._watch: Callable[[], AbstractContextManager[None]] | None = None
        self._begin_next()

    def watch(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Have every step after the first begin inside a new ``context``."""
        self._watch = context

    @property
    def movement(self) -> Movement:
        """That of the current step; ``OPERATION`` where the last test has begun a step."""
        if self._moved or self._step is None:
            return Movement.OPERATION
        return self._step.movement

    def test(self) -> bool:
        """Make progress; True once the last step is complete.

        Raises CommError if an exception such as KeyboardInterrupt has interrupted a step's start.
        """
        if self._is_interrupted:
            raise CommError(
                "it was interrupted between two of its steps, and cannot continue",
                code="communication-interrupted",
            )
        self._moved = self._step is not None and self._step.test()
        if self._moved:
            self._begin_next()
        return self._step is None

    def _begin_next(self) -> None:
        self._is_interrupted = True  # unless the next line comes to its end
        if self._watch is None:
            self._step = next(self._steps, None)
        else:
            with self._watch():
                self._step = next(self._steps, None)
        self._is_interrupted = False


_TAG = 1  # on a channel of its own nothing else is under way

Parcel = tuple[int, Buffer]
"""A rank, and the buffer that goes to it or comes from it: 1-D, contiguous, not empty."""


class AllOf(Request):
    """Requests under way at once, as one; complete when all are."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def test(self) -> bool:
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests


class PeerMessages(AllOf):
    """Sends and receives of single ranks, all posted at once.

    Messages from one rank to another arrive in the order of sending, so both ranks must list the
    same buffers in the same order.
    """

    def __init__(
        self, collectives: Collectives, *, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> None:
        assert isinstance(collectives, PointToPoint)
        receiving = [collectives.start_receive(buffer, rank, _TAG) for rank, buffer in receives]
        sending = [collectives.start_send(buffer, rank, _TAG) for rank, buffer in sends]
        super().__init__([*receiving, *sending])
