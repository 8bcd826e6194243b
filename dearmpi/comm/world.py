"""World: the ranks of this job, seen from one of them, and the channels between them.

A group is the world of some of them, which has the job's progress thread and watchdog.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NoReturn,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    get_args,
    overload,
)

import numpy as np

from dearmpi.batch_shares import BatchShare, share_batch
from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import Call, name_ranks
from dearmpi.comm.api.collectives import (
    Buffer,
    Chain,
    Collectives,
    Completed,
    ReduceOp,
    Request,
    check_contiguous,
    even_shards,
)
from dearmpi.comm.ending import Ending
from dearmpi.comm.messages.collective_calls import (
    Steps,
    broadcast_bytes,
    duplicate,
    gather_bytes,
    meet,
    reduce_values,
    run_alike,
)
from dearmpi.comm.messages.values import (
    HostBuffer,
    decode,
    encode,
    flat_numbers,
    pack,
    plain_numbers,
    unpack,
)
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.progress.progress import Progress
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.config import ProgressMode, check_choice
from dearmpi.errors import CommError, ConfigError, MismatchError
from dearmpi.guessed import COLLECTIVE, WORLD, answer_guess, answers_guesses

Wrap = Callable[[Collectives], Collectives]
Result = TypeVar("Result")
ValueOp = ReduceOp | Literal["mean"]
_BAD = "bad "  # before a color that is refused; no repr of a good one begins so
_ABORT_PATIENCE_S = 1.0  # for the progress thread to come to an end


def unchanged(collectives: Collectives) -> Collectives:
    """``collectives`` themselves, for tensors of the host."""
    return collectives


class World:
    """All ranks of the job, or a group of them. Its collective methods must be called by every
    rank of it, in one order.

    rank, size: this process's index and the number of processes.
    job_ranks: the index within the job of each rank.
    host, hosts: the name of this rank's host, and of every rank's.
    local_rank: this rank's index among those of its host.
    progress: what completes communication; its ``mode`` is ``thread`` or ``poll``.
    serves_any_thread: whether threads other than the main one may drive progress.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        progress: ProgressMode = "thread",
        stall_limits: StallLimits | None = None,
        serves_any_thread: bool = True,
        parent: World | None = None,
        job_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """``parent``, ``job_ranks``, ``name``: of a group; its limits are those of the job."""
        self.serves_any_thread = serves_any_thread
        self.rank: Final = collectives.rank
        self.size: Final = collectives.size
        self.hosts: Final = collectives.hosts
        self.host: Final = self.hosts[self.rank]
        self.job_ranks: Final = tuple(job_ranks) or tuple(range(self.size))
        self._collectives, self._parent, self._name = collectives, parent, name
        self._num_groups = 0
        if parent is None:
            self.progress = Progress(progress, origin=self._origin)
            self._watchdog = Watchdog(
                collectives,
                rank=self.rank,
                hosts=self.hosts,
                limits=stall_limits or StallLimits(),
                polls=progress == "poll",
            )
            self.progress.watch(self._watchdog)
        else:
            self.progress, self._watchdog = parent.progress, parent._watchdog
            self._watchdog.add_group(name)
        lane = f"control of {name}" if name else "control"
        self._channel = Channel(collectives, self.progress.open_lane(lane, window=1), self.progress)
        self._shared: dict[str, Channel] = {}
        self._labels: Counter[str] = Counter()
        self._calling = threading.local()  # its ``name``: of the outermost call in progress
        self._closed = self._left = False
        self._process = os.getpid()
        if parent is None:
            self._ending = Ending()
            # A channel of its own, so that no exchange of a rank that goes on mixes with it.
            self._farewell = self.open_channel("farewell", window=1)
        self.local_rank: Final = self.hosts[: self.rank].count(self.host)

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError; for another library's name, with the name to use here."""
            answer = answer_guess("World", name, WORLD)
            if answer is not None:
                raise AttributeError(answer)
            self.__getattribute__(name)  # raises as if this method were not there

    def __repr__(self) -> str:
        of = f", {self._name}" if self._name else ""
        return f"World(rank={self.rank}, size={self.size}, host={self.host!r}{of})"

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which writes to the console."""
        return self.rank == 0

    @property
    def is_group(self) -> bool:
        """Whether it is a group of the job's ranks."""
        return self._parent is not None

    @property
    def job(self) -> World:
        """The world of all ranks of the job: this one, or that which it is a group of."""
        return self if self._parent is None else self._parent.job

    @property
    def has_progress_thread(self) -> bool:
        """Whether there are other ranks, and a thread of its own completes communication."""
        return self.size > 1 and self.progress.mode == "thread"

    def group(self, ranks: Iterable[SupportsIndex]) -> World | None:
        """The world of ``ranks``, in this order; None on other ranks (collective).

        Every rank of this world gives the same ``ranks``; ``split`` makes several groups at once.
        ``DistributedOptimizer(..., world=group)`` trains on them; ``world=None`` means all of the
        job. A group has this world's progress thread and stall limits, and ends with it.
        Raises ConfigError for ranks that there are not, or twice; MismatchError if they differ.
        """
        given = tuple(map(_whole, ranks)) if isinstance(ranks, Iterable) else ranks
        with self.named_call(f"world.group({_describe_ranks(given)})"):
            self._exchange("making of a group", meet)  # first, so that all ranks raise alike
        return self._make_group(_ranks_of(given, self.size))

    def split(self, color: SupportsIndex | str | None) -> World | None:
        """The world of all ranks that give the same ``color``, by rank; None for None (collective).

        Two ranks each on four: ``world.split(world.rank // 2)``.
        Raises ConfigError on every rank for a ``color`` of another type.
        """
        color = int(color) if isinstance(color, bool) else _whole(color)
        is_good = color is None or isinstance(color, (int, str))
        with self.named_call("world.split()"):
            colors = self.all_gather_text(("" if is_good else _BAD) + repr(color))
        for rank, one in enumerate(colors):
            if one.startswith(_BAD):
                raise ConfigError(
                    f"color is {one.removeprefix(_BAD)} on rank {rank} of {self.size}; give the "
                    "same whole number, or text, on all ranks that are to be one group, and None "
                    "on ranks of none",
                    code="wrong-type",
                )
        return self._make_group(
            () if color is None else [r for r, one in enumerate(colors) if one == repr(color)]
        )

    def _make_group(self, ranks: Sequence[int]) -> World | None:
        """Of ``ranks``, which all know that they make it."""
        self._num_groups += 1
        if self.rank not in ranks:
            self._watchdog.leave_out()
            return None
        made: list[Collectives] = []
        try:
            self.on_progress_thread(
                lambda: made.append(self._collectives.make_group(ranks, self._num_groups))
            )
        except CommError as error:
            if type(error) is not CommError:  # others have stalled, or are not alike
                raise
            raise CommError(
                f"{error}\n{self._num_groups} groups were asked for. MPI may have run out of "
                "communicators, since a group lasts as long as the job: make each once, before "
                "training, and not in every step",
                code="channel-not-opened",
            ) from error
        of_job = [self.job_ranks[rank] for rank in ranks]
        name = f"group {self._num_groups} of {name_ranks(of_job, self.job.hosts)}"
        return World(
            made[0],
            progress=self.progress.mode,
            serves_any_thread=self.serves_any_thread,
            parent=self,
            job_ranks=of_job,
            name=f"{name} in {self._name}" if self._name else name,
        )

    def open_channel(
        self,
        name: str,
        *,
        window: int,
        wrap: Wrap = unchanged,
    ) -> Channel:
        """A channel with an order of its own (collective).

        window: most operations in flight. wrap: wraps the collectives that operations start with,
        as for tensors of a device. Raises CommError if MPI has no communicator left.
        """
        try:
            twin = self._exchange(f"opening of a channel for {name}", duplicate)
        except CommError as error:
            if type(error) is not CommError:  # others have stalled, or are not alike
                raise
            raise CommError(
                f"{error}\n{self.progress.num_lanes} lanes are open in this process, 4 to 6 for "
                "each DistributedOptimizer. With hundreds of them MPI may have run out of "
                "communicators: call close() on optimizers that are no longer needed",
                code="channel-not-opened",
            ) from error
        return Channel(wrap(twin), self.progress.open_lane(name, window), self.progress)

    def shared_channel(self, name: str) -> Channel:
        """The channel called ``name``, opened at the first call (collective)."""
        if name not in self._shared:
            self._shared[name] = self.open_channel(name, window=1)
        return self._shared[name]

    @answers_guesses("world.all_reduce", COLLECTIVE)
    def all_reduce(
        self, values: Sequence[SupportsFloat] | SupportsFloat, op: ValueOp = "sum"
    ) -> list[float]:
        """Reduce each value over the ranks, which give equally many (collective).

        values: numbers, or a tensor of one dimension. A single number counts as a list of one.
        op: ``sum``, ``max``, ``min`` or ``mean``.
        """
        check_choice("op", op, (*get_args(ReduceOp), "mean"))
        array = flat_numbers(values)
        with self.named_call("world.all_reduce()"):
            operation = f"{op} of {len(array)} {'value' if len(array) == 1 else 'values'}"
            own = "sum" if op == "mean" else op
            reduced = self._exchange(operation, partial(reduce_values, values=array, op=own))
        share = self.size if op == "mean" else 1
        return [float(value) / share for value in reduced]

    @overload
    def mean(self, values: SupportsFloat) -> float: ...
    @overload
    def mean(self, values: Sequence[SupportsFloat]) -> list[float]: ...
    @answers_guesses("world.mean", COLLECTIVE)
    def mean(self, values: Any) -> list[float] | float:
        """The average over ranks of a number, such as a loss, or of each in a list (collective)."""
        numbers = plain_numbers(values)
        with self.named_call("world.mean()"):
            averages = self.all_reduce(numbers, "mean")
        return averages if isinstance(numbers, list) else averages[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank (collective)."""
        with self.named_call("world.all_gather_text()"):
            steps = partial(gather_bytes, data=encode(text))
            return [decode(data) for data in self._exchange("all-gather of texts", steps)]

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text on every rank; the others' is ignored (collective)."""
        with self.named_call("world.broadcast_text()"):
            steps = partial(broadcast_bytes, data=encode(text or ""), root=0)
            return decode(self._exchange("broadcast of a text", steps))

    @answers_guesses("world.all_gather_object", COLLECTIVE)
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's object, pickled on its way, by rank (collective).

        Raises ConfigError on every rank if one cannot be pickled, or if the largest, times the
        number of ranks, exceeds 2 GiB.
        """
        packed = pack(value, copies=self.size, origin=self._origin)
        with self.named_call("world.all_gather_object()"):
            sent = self._exchange("all-gather of objects", partial(gather_bytes, data=packed))
        return unpack(sent, reader=self._origin)

    @answers_guesses("world.broadcast_object", COLLECTIVE)
    def broadcast_object(self, value: Any = None, root: SupportsIndex = 0) -> Any:
        """The object of ``root``, pickled on its way; the others' is ignored (collective).

        Raises ConfigError on every rank if it cannot be pickled, or exceeds 2 GiB.
        """
        root = self._check_root(root)
        own = value if self.rank == root else None
        packed = pack(own, copies=1, origin=self._origin)
        with self.named_call("world.broadcast_object()"):
            steps = partial(broadcast_bytes, data=packed, root=root)
            sent = self._exchange(f"broadcast of an object from rank {root}", steps)
        return unpack([sent], reader=self._origin)[0]

    @answers_guesses("world.broadcast", COLLECTIVE)
    def broadcast(self, buffer: Buffer, root: SupportsIndex = 0) -> None:
        """Overwrite ``buffer`` (a 1-D, contiguous tensor) with that of ``root`` (collective)."""
        root = self._check_root(root)
        check_contiguous("broadcast", buffer)
        with self.named_call("world.broadcast()"):
            self._exchange(
                f"broadcast of {_describe(buffer)} from rank {root}",
                partial(run_alike, start=lambda c: c.start_broadcast(buffer, root)),
            )

    @answers_guesses("world.all_gather", COLLECTIVE)
    def all_gather(self, buffer: Buffer) -> None:
        """Fill ``buffer`` with every rank's shard (collective).

        buffer: a 1-D, contiguous tensor, whose length is a multiple of the size.
        """
        check_contiguous("all-gather", buffer)
        even_shards("all-gather", buffer, self.size)
        with self.named_call("world.all_gather()"):
            self._exchange(
                f"all-gather of {_describe(buffer)}",
                partial(run_alike, start=lambda c: c.start_all_gather(buffer)),
            )

    def batch_share(
        self,
        batch_size: int,
        shares: Sequence[float] | Literal["even", "auto"] = "even",
        *,
        before: BatchShare | None = None,
        seconds: float = 0.0,
    ) -> BatchShare:
        """What this rank computes of a batch of ``batch_size`` samples (collective).

        ``(share.weight * loss_of(batch[share.start : share.stop])).backward()`` gives the gradient
        of the mean over the batch, for any shares.

        shares: a number above 0 for each rank; or ``auto``, by ``seconds``: what this rank computes
        in a step, without waits, with its share ``before``. Rank 0 decides; ``before`` stays unless
        a step gets more than 5 % shorter.
        Raises ConfigError for shares that leave a rank without samples, MismatchError if ranks
        differ.
        """
        with self.named_call("world.batch_share()"):
            return share_batch(self, batch_size, shares, before=before, seconds=seconds)

    def loss_weight(self, weight: float) -> float:
        """By what to multiply this rank's loss where ranks count by ``weight`` (collective).

        The averaged gradient is then that of the weighted losses over the sum of weights. A rank
        with weight 0, whose batch is not there, gets 0 and may leave backprop out, but must step.
        If all weights are 0, so is the result on all ranks: leave the step out on all.
        Raises ConfigError on all ranks for a weight that is negative or not finite.
        """
        try:
            value = float(weight)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        is_good = 0 <= value < math.inf
        total, num_bad = self.all_reduce([value if is_good else 0.0, not is_good])
        if num_bad:
            raise ConfigError(
                f"weight is {weight} on rank {self.rank}, and {num_bad:.0f} of {self.size} ranks "
                "have one that is negative or not finite; give a number of 0 or more",
                code="out-of-range",
            )
        if math.isinf(total * self.size):
            raise ConfigError(
                f"weights of {self.size} ranks add up to {total}, beyond what can be reckoned "
                "with; give smaller ones, since only their proportions count",
                code="out-of-range",
            )
        return value * self.size / total if total else 0.0

    @answers_guesses("world.barrier", COLLECTIVE)
    def barrier(self) -> None:
        """Wait for every rank (collective)."""
        with self.named_call("world.barrier()"):
            self._exchange("wait for every rank", meet)

    @contextmanager
    def named_call(self, name: str) -> Iterator[None]:
        """Collective calls inside belong to the script's call of ``name``, which errors name.

        The outermost name counts. Raises MismatchError if ranks call different names.
        """
        outermost = not hasattr(self._calling, "name")
        if outermost:
            self._calling.name = name
        try:
            yield
        finally:
            if outermost:
                del self._calling.name

    def label(self, kind: str) -> str:
        """``kind`` for the first call with it, ``kind 2`` for the second, and so on."""
        self._labels[kind] += 1
        return kind if self._labels[kind] == 1 else f"{kind} {self._labels[kind]}"

    def abort(self, code: int) -> NoReturn:
        """End the whole job with exit status ``code``, even if output cannot be written.

        Any thread may call it; the first call counts. The status is never 0: a ``code`` whose last
        eight bits are 0 counts as 1.
        """
        code = self.job._ending.begin(code)
        safe_output.wait_until_read()
        # Else it would still run while MPI's exit handlers destroy the libraries that it uses.
        self.progress.close(patience_s=_ABORT_PATIENCE_S)
        self._collectives.abort(code)
        os._exit(code)

    def wait_for_abort(self) -> None:
        """Return unless another thread of this process is ending the job."""
        self.job._ending.wait_for_others()

    def on_progress_thread(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the progress thread, and wait for its end."""

        def start(_: Collectives) -> Request:
            action()
            return Completed()

        self._channel.run("a call on the progress thread", start)

    def name_training(self) -> str:
        """A name for what one optimizer trains, the same on all ranks that make it in one order."""
        name = self.label("training")
        name = f"{name} in {self._name}" if self._name else name
        self._watchdog.add_training(name)
        return name

    def end_training(self, training: str) -> None:
        """This rank takes part in ``training``, a name by ``name_training``, no more."""
        self._watchdog.end_training(training)

    def begin_backprop(self, training: str = "") -> None:
        """Count a backprop with communication, for reports of waits that last."""
        self._watchdog.begin_backprop(training)

    def begin_read(self) -> None:
        """Note a read of gradients before the step, for reports of waits that last."""
        self._watchdog.begin_read()

    def begin_step(self, training: str = "") -> None:
        """Count a step, for reports of waits that last."""
        self._watchdog.begin_step(training)

    @property
    def _origin(self) -> str:
        return f"rank {self.job_ranks[self.rank]} on {self.host}"

    def _refuse_for_group(self, call: str) -> None:
        if self._parent is not None:
            raise ConfigError(
                f"{call} of the {self._name}, which ends with the job; call it on the world that "
                "dearmpi.connect() returned, or leave it out",
                code="settings-contradict",
            )

    def _check_root(self, root: SupportsIndex) -> int:
        """``root`` as an int. Raises ConfigError unless it is a rank."""
        root = _whole(root)
        if isinstance(root, bool) or not isinstance(root, int):
            raise ConfigError(
                f"root is {root!r}, of type {type(root).__name__}; give the number of a rank",
                code="wrong-type",
            )
        if not 0 <= root < self.size:
            raise ConfigError(
                f"root is rank {root}, but the world size is {self.size}", code="out-of-range"
            )
        return root

    def _exchange(self, operation: str, steps: Steps[Result]) -> Result:
        """The result of ``steps``.

        Raises MismatchError on every rank if ranks are in different calls; no operation is then in
        flight.
        """
        name = getattr(self._calling, "name", operation)
        if self._name:
            name = f"{name} in {self._name}"
        call = Call(name, operation, threading.get_ident(), self.job_ranks)
        results: list[Result] = []
        problems: list[MismatchError] = []

        def follow(collectives: Collectives) -> Iterator[Request]:
            try:
                results.append((yield from steps(collectives, call)))
            except MismatchError as error:
                problems.append(error)

        with self._watchdog.exchange(self._name):
            self._channel.run(str(call), lambda c: Chain(follow(c)))
        if problems:
            raise problems[0]
        return results[0]

    def leave(self, *, exit_status: int = 0) -> None:
        """Wait until every rank has finished its work, then close (collective).

        exit_status: with which the program ends; the job does, too, if others wait for it in vain.
        Raises StallError if this rank waits for others in vain, or they for it; the message names
        operations that not every rank has joined. Raises ConfigError for a group.
        """
        self._refuse_for_group("leave()")
        if not self._closed:
            self.progress.drain()
            self._watchdog.leave(exit_status)
            here = HostBuffer(np.zeros(1))
            self._farewell.run(
                "the end of the other ranks' programs", lambda c: c.start_all_reduce(here, "max")
            )
            self._left = True
            self.close()

    @property
    def is_closed(self) -> bool:
        """Whether no operation can complete any more, as in a fork of the process."""
        if self._parent is not None:
            return self._parent.is_closed
        return self._closed or os.getpid() != self._process

    @property
    def may_be_awaited(self) -> bool:
        """Whether other ranks may wait for this one, closed or not; never in a fork of a rank."""
        return not self._left and os.getpid() == self._process

    def close(self) -> None:
        """Stop progress; no operation may be pending. Safe to call twice.

        Raises ConfigError for a group.
        """
        self._refuse_for_group("close()")
        self._closed = True
        self.progress.close()


def _whole(value: Any) -> Any:
    """``value`` as an int, if it is a whole number of another library, such as numpy's."""
    try:
        return value if isinstance(value, (bool, str)) else operator.index(value)
    except TypeError:
        return value


def _describe_ranks(given: object) -> str:
    """The same text on all ranks that give the same."""
    if not isinstance(given, tuple):
        return f"of type {type(given).__name__}"
    return str([rank if isinstance(rank, int) else str(rank) for rank in given])


def _ranks_of(ranks: object, size: int) -> tuple[int, ...]:
    """``ranks``, checked. Raises ConfigError unless they are different ranks."""
    if not isinstance(ranks, tuple):
        raise ConfigError(
            f"the ranks of a group are of type {type(ranks).__name__}; give a list of ranks, such "
            "as [0, 1]",
            code="wrong-type",
        )
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ConfigError(
                f"a rank of a group is {rank!r}; give whole numbers", code="wrong-type"
            )
        if not 0 <= rank < size or ranks.count(rank) > 1:
            raise ConfigError(
                f"the ranks of a group are {list(ranks)}; each must be from 0 to {size - 1}, and "
                "there once",
                code="out-of-range",
            )
    if not ranks:
        raise ConfigError("a group of no ranks; give at least one", code="out-of-range")
    return ranks


def _describe(buffer: Buffer) -> str:
    return f"{buffer.numel()} elements of {str(buffer.dtype).removeprefix('torch.')}"
