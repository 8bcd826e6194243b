"""World: the ranks of this job, seen from one of them, and the channels between them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    SupportsFloat,
    TypeVar,
    get_args,
    overload,
)

import numpy as np

from dearmpi.comm import last_words
from dearmpi.comm.absence import CURE
from dearmpi.comm.api import Buffer, Collectives, Completed, ReduceOp, Request
from dearmpi.comm.call import Call
from dearmpi.comm.chain import Chain
from dearmpi.comm.channel import Channel
from dearmpi.comm.ending import abort_on_exception, leave, limit_end
from dearmpi.comm.exchange import (
    Steps,
    broadcast_bytes,
    duplicate,
    gather_bytes,
    meet,
    reduce_values,
    run_alike,
)
from dearmpi.comm.host import HostBuffer, flat_numbers, plain_numbers
from dearmpi.comm.launch import announced_size, check_launch, limit_start
from dearmpi.comm.objects import pack, unpack
from dearmpi.comm.progress import Progress
from dearmpi.comm.shard import check_contiguous, check_shards
from dearmpi.comm.texts import decode, encode
from dearmpi.comm.watchdog import StallLimits, Watchdog
from dearmpi.comm.workers import keep_from_mpi, refuse_workers
from dearmpi.config import ProgressMode, check_choice
from dearmpi.errors import CommError, ConfigError, DearError, LaunchError, MismatchError
from dearmpi.guessed import CONNECTION, WORLD, answer_guess, answers_guesses

Carry = Callable[[Collectives], Collectives]
Result = TypeVar("Result")
ValueOp = ReduceOp | Literal["mean"]
_POLLS_UNASKED = (
    "this MPI library does not grant MPI_THREAD_MULTIPLE, so every rank runs with "
    "progress='poll': communication goes on only while the main thread calls the model, the "
    f"optimizer or the world, and hides less. To avoid hangs, {CURE}, which needs a library that "
    "grants it, such as the packages mpich and openmpi. connect(progress='poll') ends this notice"
)
_ABORT_PATIENCE_S = 1.0  # for the driving thread to come to an end


def unchanged(collectives: Collectives) -> Collectives:
    """What carries nothing."""
    return collectives


class World:
    """All ranks of the job. Its collective methods must be called by every rank, in one order.

    rank, size: this process's index and the number of processes.
    host, hosts: the name of this rank's host, and of every rank's.
    local_rank: this rank's index among those of its host.
    serves_any_thread: whether threads other than the main one may drive progress.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        progress: ProgressMode = "thread",
        stall_limits: StallLimits | None = None,
        serves_any_thread: bool = True,
    ) -> None:
        self.serves_any_thread = serves_any_thread
        self.rank = collectives.rank
        self.size = collectives.size
        self.hosts = collectives.hosts
        self.host = self.hosts[self.rank]
        self.progress = Progress(progress, origin=self._origin)
        self._collectives = collectives
        self._channel = Channel(
            collectives, self.progress.open_lane("control", window=1), self.progress
        )
        self._watchdog = Watchdog(
            collectives,
            rank=self.rank,
            hosts=self.hosts,
            limits=stall_limits or StallLimits(),
            polls=progress == "poll",
        )
        self.progress.watch(self._watchdog)
        self._shared: dict[str, Channel] = {}
        self._labels: Counter[str] = Counter()
        self._calling = threading.local()  # its ``name``: of the outermost call under way
        self._closed = False
        self._process = os.getpid()
        # Of its own: no exchange of a rank that goes on may take part in it.
        self._farewell = self.open_channel("farewell", window=1)
        self.local_rank = self.hosts[: self.rank].count(self.host)

    if not TYPE_CHECKING:  # which would take any name for one that there is

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError for a name that it lacks; others' names lead to those here."""
            told = answer_guess("World", name, WORLD)
            if told is not None:
                raise AttributeError(told)
            self.__getattribute__(name)  # raises as if this method were not there

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, host={self.host!r})"

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that speaks."""
        return self.rank == 0

    @property
    def has_progress_thread(self) -> bool:
        """Whether a thread of its own drives communication, and there is some."""
        return self.size > 1 and self.progress.mode == "thread"

    def open_channel(
        self,
        name: str,
        *,
        window: int,
        carry: Carry = unchanged,
    ) -> Channel:
        """A channel with an order of its own (collective).

        carry: makes of the channel's collectives those that its operations are started with.
        Raises CommError if MPI has no communicator left for it.
        """
        try:
            twin = self._exchange(f"opening of a channel for {name}", duplicate)
        except CommError as error:
            if type(error) is not CommError:  # others have stalled, or are not alike
                raise
            raise CommError(
                f"{error}\n{self.progress.num_lanes} lanes are open in this process, 4 to 6 for "
                "each DistributedOptimizer; if there are hundreds, MPI may have no communicator "
                "left: call close() on those that are no longer needed"
            ) from error
        return Channel(carry(twin), self.progress.open_lane(name, window), self.progress)

    def shared_channel(self, name: str) -> Channel:
        """That of all who ask for it by this name, opened at the first call (collective)."""
        if name not in self._shared:
            self._shared[name] = self.open_channel(name, window=1)
        return self._shared[name]

    def all_reduce(
        self, values: Sequence[SupportsFloat] | SupportsFloat, op: ValueOp = "sum"
    ) -> list[float]:
        """Reduce each value over the ranks, which must all have as many.

        values: numbers, or a tensor of one dimension. A number by itself counts as a list of one.
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
    def mean(self, values: Any) -> list[float] | float:
        """The average over the ranks: of a number, such as a loss, or of each number of a list."""
        numbers = plain_numbers(values)
        with self.named_call("world.mean()"):
            averages = self.all_reduce(numbers, "mean")
        return averages if isinstance(numbers, list) else averages[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        with self.named_call("world.all_gather_text()"):
            steps = partial(gather_bytes, data=encode(text))
            return [decode(data) for data in self._exchange("all-gather of texts", steps)]

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text on every rank; the others' is ignored."""
        with self.named_call("world.broadcast_text()"):
            steps = partial(broadcast_bytes, data=encode(text or ""), root=0)
            return decode(self._exchange("broadcast of a text", steps))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's object, pickled on its way, by rank.

        Raises ConfigError on every rank if one cannot be pickled, or if all together, each as
        large as the largest, exceed 2 GiB.
        """
        packed = pack(value, copies=self.size, origin=self._origin)
        with self.named_call("world.all_gather_object()"):
            sent = self._exchange("all-gather of objects", partial(gather_bytes, data=packed))
        return unpack(sent, reader=self._origin)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The object of ``root``, pickled on its way, on every rank; the others' is ignored.

        Raises ConfigError on every rank if it cannot be pickled, or exceeds 2 GiB.
        """
        self._check_root(root)
        own = value if self.rank == root else None
        packed = pack(own, copies=1, origin=self._origin)
        with self.named_call("world.broadcast_object()"):
            steps = partial(broadcast_bytes, data=packed, root=root)
            sent = self._exchange(f"broadcast of an object from rank {root}", steps)
        return unpack([sent], reader=self._origin)[0]

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Overwrite ``buffer`` (1-D, contiguous) with that of ``root``."""
        self._check_root(root)
        check_contiguous("broadcast", buffer)
        with self.named_call("world.broadcast()"):
            self._exchange(
                f"broadcast of {_describe(buffer)} from rank {root}",
                partial(run_alike, start=lambda c: c.start_broadcast(buffer, root)),
            )

    def all_gather(self, buffer: Buffer) -> None:
        """Fill ``buffer`` (1-D, contiguous, a multiple of the size) with every rank's shard."""
        check_contiguous("all-gather", buffer)
        check_shards("all-gather", buffer, self.size)
        with self.named_call("world.all_gather()"):
            self._exchange(
                f"all-gather of {_describe(buffer)}",
                partial(run_alike, start=lambda c: c.start_all_gather(buffer)),
            )

    def barrier(self) -> None:
        """Wait for every rank."""
        with self.named_call("world.barrier()"):
            self._exchange("wait for every rank", meet)

    @contextmanager
    def named_call(self, name: str) -> Iterator[None]:
        """Collective calls inside belong to the script's call of ``name``, which errors name.

        The outermost name counts. Ranks that call different names get a MismatchError.
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
        """End the whole job with exit status ``code``, whatever became of standard output."""
        last_words.deliver()
        # Else it would work on while MPI's exit takes down the libraries under it.
        self.progress.close(patience_s=_ABORT_PATIENCE_S)
        self._collectives.abort(code)
        os._exit(code)

    def on_driving_thread(self, action: Callable[[], None]) -> None:
        """Have the thread that drives progress call ``action``, and wait for it."""

        def start(_: Collectives) -> Request:
            action()
            return Completed()

        self._channel.run("a call on the driving thread", start)

    def begin_backprop(self) -> None:
        """A backprop with communication begins; ranks that wait in vain tell each other which."""
        self._watchdog.begin_backprop()

    def begin_step(self) -> None:
        """A step begins, which the parameters after it wait for on all ranks."""
        self._watchdog.begin_step()

    @property
    def _origin(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"root is rank {root}, but the world size is {self.size}")

    def _exchange(self, operation: str, steps: Steps[Result]) -> Result:
        """The result of ``steps``. Raises MismatchError if ranks are in different calls, on all
        of them, with nothing under way.
        """
        name = getattr(self._calling, "name", operation)
        call = Call(name, operation, threading.get_ident())
        results: list[Result] = []
        problems: list[MismatchError] = []

        def follow(collectives: Collectives) -> Iterator[Request]:
            try:
                results.append((yield from steps(collectives, call)))
            except MismatchError as error:
                problems.append(error)

        with self._watchdog.exchange():
            self._channel.run(str(call), lambda c: Chain(follow(c)))
        if problems:
            raise problems[0]
        return results[0]

    def leave(self) -> None:
        """Wait until every rank has nothing more to do, then close (collective).

        Raises StallError if others still wait for this rank, or it for them: also if it has begun
        operations, which it names, that not every rank has joined.
        """
        if not self._closed:
            self.progress.drain()
            self._watchdog.leave()
            here = HostBuffer(np.zeros(1))
            self._farewell.run(
                "the end of the other ranks' programs", lambda c: c.start_all_reduce(here, "max")
            )
            self.close()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is driven any more, as in a fork of the process that connected."""
        return self._closed or os.getpid() != self._process

    def close(self) -> None:
        """Stop driving progress; no operation may be pending. Safe to call twice."""
        self._closed = True
        self.progress.close()


class _Process:
    """The world of this process: MPI is initialised once in a process, and so is this."""

    world: ClassVar[World | None] = None
    progress: ClassVar[ProgressMode] = "thread"  # as asked for; the world's own may be "poll"


@answers_guesses("connect", CONNECTION)
def connect(
    progress: ProgressMode | None = None, *, stall_limits: StallLimits | None = None
) -> World:
    """The world that this process was launched into; the same object at every call.

    progress: ``thread`` (default) or ``poll``; below MPI_THREAD_MULTIPLE always ``poll``.
    stall_limits: how long a wait for other ranks may last; counts at the first call only.
    An exception that nobody catches then ends the whole job, so that no rank waits forever.
    Processes that this one starts then leave MPI alone, also where they import ``mpi4py.MPI``.
    Raises LaunchError if the launcher announced more ranks than MPI sees, and in a process that a
    rank has started.
    """
    if progress is not None and not isinstance(progress, str):
        raise _refuse_group("progress", progress)
    world = _Process.world
    if world is None:
        refuse_workers(os.environ)
        asked = progress or "thread"
        is_first = "mpi4py.MPI" not in sys.modules  # others may need MPI until they have ended
        world = _connect(asked, stall_limits)
        _Process.world, _Process.progress = world, asked
        keep_from_mpi(os.environ)
        deadline = None
        if world.size > 1:
            deadline = limit_end(world, stall_limits or StallLimits()) if is_first else None
            abort_on_exception(world)
        atexit.register(leave, world, deadline)
    elif progress is not None and progress != _Process.progress:
        raise ConfigError(
            f"progress is {progress!r}, but this process was connected with "
            f"{_Process.progress!r}; choose it at the first connect()"
        )
    return world


def choose_world(world: object) -> World:
    """``world``, or for None the one that this process was launched into.

    Raises ConfigError for whatever else a script takes for a group of ranks.
    """
    if world is None:
        return connect()
    if not isinstance(world, World):
        raise _refuse_group("world", world)
    return world


def _refuse_group(name: str, given: object) -> ConfigError:
    wanted = "a World" if name == "world" else "'thread' or 'poll'"
    return ConfigError(
        f"{name} is of type {type(given).__name__}, not {wanted}; leave it out, or give what "
        "dearmpi.connect() returns as world=. All ranks of the job train together: communicators "
        "and process groups of some of them are not supported yet; start a job of its own (mpirun) "
        "for each group of ranks"
    )


def _connect(progress: ProgressMode, stall_limits: StallLimits | None) -> World:
    try:
        from dearmpi.comm import mpi

        with limit_start(stall_limits or StallLimits()):
            collectives: Collectives = mpi.connect()
    except (ImportError, RuntimeError) as error:
        announced = announced_size(os.environ)
        if announced > 1:
            raise LaunchError(
                f"{announced} ranks were launched, but MPI cannot be loaded: {error}; install one "
                "with pip install 'dearmpi[mpich]', or load your site's MPI module"
            ) from error
        from dearmpi.comm.alone import AloneCollectives

        return World(AloneCollectives(), progress="poll")
    check_launch(collectives.size, os.environ)
    if not mpi.supports_threads():
        if progress != "poll" and collectives.size > 1 and collectives.rank == 0:
            last_words.say(f"[rank 0 on {collectives.hosts[0]}] {_POLLS_UNASKED}")
        progress = "poll"
    try:
        return World(
            collectives,
            progress=progress,
            stall_limits=stall_limits,
            serves_any_thread=mpi.serves_any_thread(),
        )
    except Exception as error:
        if collectives.size > 1:  # nothing else would end the others, who wait for this rank
            host = collectives.hosts[collectives.rank]
            last_words.say(f"[rank {collectives.rank} on {host}] {error}")
            collectives.abort(error.exit_code if isinstance(error, DearError) else 1)
        raise


def _describe(buffer: Buffer) -> str:
    return f"{buffer.numel()} elements of {str(buffer.dtype).removeprefix('torch.')}"
