"""Loading: batches of a run, read by the training process itself or by worker processes.

A fork server starts the workers, because a fork of a process that uses MPI may break its messages.
Workers ignore the signals that request a stop; they end with their rank.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver, get_context, parent_process
from typing import Any, Protocol

import torch

from dearmpi.errors import ConfigError, DataError
from dearmpi.train.data.data import load_batch
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.ranks.stop import SIGNALS
from dearmpi.train.tasks.task import Task
from dearmpi.train.tasks.task_registry import prepare_to_load

_AHEAD = 2  # batches of each process that are ready or on their way


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch of samples at ``indices``, of the held-out data or of the training data.

    seed: of the random numbers that a worker process draws for it, so that they depend neither on
    the number of workers nor on a restart.
    stream: of a stream, epoch, step in it and number of the micro-batch, instead of the indices;
    what is loaded is a StreamBatch.
    weights: of a stream, by which the ranks share a step's samples; none of them: evenly.
    """

    indices: tuple[int, ...]
    held_out: bool = False
    seed: tuple[int, ...] = (0,)
    stream: tuple[int, int, int] | None = None
    weights: tuple[float, ...] = ()


class BatchLoader(Protocol):
    """Loads batches. Raises DataError for samples that cannot be read or make no batch."""

    def expect(self, coming: Iterable[BatchRequest], *, held_out: bool = False) -> None:
        """Announce the next batches in order; ``held_out`` holds for all of them."""
        ...

    def load(self, wanted: BatchRequest) -> Any:
        """The batch, on the host."""
        ...

    def close(self) -> None:
        """End loading."""
        ...


class InlineLoader:
    """Loads each batch in the calling thread, when ``load`` is called."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def expect(self, coming: Iterable[BatchRequest], *, held_out: bool = False) -> None:
        """Does nothing: nothing is loaded ahead."""

    def load(self, wanted: BatchRequest) -> Any:
        """Load the batch; random numbers come from the generators of training."""
        return _load(self._task, wanted)

    def close(self) -> None:
        """Does nothing: no process was started."""


class WorkerLoader:
    """``num_workers`` processes load what is expected, while the training one trains."""

    def __init__(self, task: Task, *, name: str, num_workers: int) -> None:
        """name: the task as given to ``--task``. Raises ConfigError for a task whose samples cannot
        be sent to another process.
        """
        self._task, self._most = task, _AHEAD * num_workers
        # By whether they are held out.
        self._coming: dict[bool, Iterator[BatchRequest]] = {False: iter(()), True: iter(())}
        self._ahead: dict[bool, deque[tuple[BatchRequest, Future[Any]]]] = {
            False: deque(),
            True: deque(),
        }
        context = get_context("forkserver")
        self._heard, self._end = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            num_workers,
            context,
            initializer=_begin,
            initargs=(name, _pack(task, num_workers), self._heard),
        )
        with _kept_from_signals():
            forkserver.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        for _ in range(num_workers):  # each starts one, beside what is prepared meanwhile
            self._pool.submit(os.getpid)

    def expect(self, coming: Iterable[BatchRequest], *, held_out: bool = False) -> None:
        """Load these batches ahead, and drop earlier ones of the same data set."""
        for _, batch in self._ahead[held_out]:
            batch.cancel()
        self._coming[held_out], self._ahead[held_out] = iter(coming), deque()
        self._go_on(held_out)

    def load(self, wanted: BatchRequest) -> Any:
        """Return the batch; one that was not announced is loaded now."""
        ahead = self._ahead[wanted.held_out]
        if not ahead or ahead[0][0] != wanted:
            return self._await(self._submit(wanted))
        _, batch = ahead.popleft()
        self._go_on(wanted.held_out)
        return self._await(batch)

    def close(self) -> None:
        """End the processes without waiting for batches under way."""
        self._end.send_bytes(b"end")
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _go_on(self, held_out: bool) -> None:
        ahead, coming = self._ahead[held_out], self._coming[held_out]
        while len(ahead) < self._most and (wanted := next(coming, None)) is not None:
            ahead.append((wanted, self._submit(wanted)))

    def _submit(self, wanted: BatchRequest) -> Future[Any]:
        try:
            return self._pool.submit(_load_seeded, wanted)
        except BrokenProcessPool as error:
            raise self._broken() from error

    def _await(self, batch: Future[Any]) -> Any:
        try:
            return batch.result()
        except BrokenProcessPool as error:
            raise self._broken() from error

    def _broken(self) -> DataError:
        return DataError(
            f"task {self._task.name}: a process that loads samples (--workers) did not start "
            "or has ended. If it printed no error above, memory or /dev/shm ran out: use "
            "fewer --workers, or 0. A task file that imports mpi4py starts MPI there: import "
            "it inside the function that uses it",
            code="worker-ended",
        )


def open_loader(task: Task, *, name: str, num_workers: int) -> BatchLoader:
    """A WorkerLoader with ``num_workers`` processes, or an InlineLoader for 0."""
    if not num_workers:
        return InlineLoader(task)
    return WorkerLoader(task, name=name, num_workers=num_workers)


def _load(task: Task, wanted: BatchRequest) -> Any:
    data: Any = task.eval_data if wanted.held_out else task.train_data
    if wanted.stream is not None:
        return data.load(task, *wanted.stream, wanted.weights)
    assert data is not None
    return load_batch(task, data, wanted.indices)


def _pack(task: Task, num_workers: int) -> bytes:
    """The parts of ``task`` for a worker, pickled by torch, which writes shared memory once."""
    nothing: Any = None
    needed = replace(
        task,
        model=nothing,
        loss=nothing,
        metrics=None,
        summarize=None,
        notes=(),
        defaults={},
        callbacks=(),
    )
    file = io.BytesIO()
    try:
        torch.save(needed, file)
    except Exception as error:  # whatever pickling meets
        raise ConfigError(
            f"task {task.name}: its data and collate function cannot be sent to other "
            f"processes (workers {num_workers}): {type(error).__name__}: {error}; define their "
            "classes and functions at the top of a file, not inside functions, or give "
            "--workers 0",
            code="task-not-picklable",
        ) from error
    return file.getvalue()


@contextmanager
def _kept_from_signals() -> Iterator[None]:
    """Processes started inside ignore the signals that request a stop. This process handles signals
    that arrive meanwhile afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker.

_served: Task | None = None


def _begin(name: str, packed: bytes, heard: connection.Connection) -> None:
    global _served
    threading.Thread(target=_end_with_rank, args=(heard,), daemon=True).start()
    torch.set_num_threads(1)
    prepare_to_load(name)
    _served = torch.load(io.BytesIO(packed), weights_only=False)


def _end_with_rank(heard: connection.Connection) -> None:
    """End this process when the rank closes the loader or has ended. All workers wait on one pipe,
    so none reads from it.
    """
    rank = parent_process()
    assert rank is not None
    connection.wait([rank.sentinel, heard])
    os._exit(1)


def _load_seeded(wanted: BatchRequest) -> Any:
    assert _served is not None
    seed_all(*wanted.seed)
    return _load(_served, wanted)
