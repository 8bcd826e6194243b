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
from dearmpi.train.tasks.registry import prepare_to_load
from dearmpi.train.tasks.task import Task

_AHEAD = 2  # batches of each process that are ready or on their way


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch: of the ``held_out`` samples or of those to train on, at ``indices``.

    seed: from which a process beside the training one draws what is random in loading, so that it
    does not matter which of how many that is, or whether the run was stopped before.
    """

    indices: tuple[int, ...]
    held_out: bool = False
    seed: tuple[int, ...] = (0,)


class BatchLoader(Protocol):
    """Who loads. Raises DataError for samples that cannot be read or make no batch."""

    def expect(self, coming: Iterable[BatchRequest], *, held_out: bool = False) -> None:
        """These, all ``held_out`` or none, will be wanted next, in this order."""
        ...

    def load(self, wanted: BatchRequest) -> Any:
        """The batch, on the host."""
        ...

    def close(self) -> None:
        """Nothing is wanted any more."""
        ...


class InlineLoader:
    """The calling thread loads, when asked."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def expect(self, coming: Iterable[BatchRequest], *, held_out: bool = False) -> None:
        """That helps nobody."""

    def load(self, wanted: BatchRequest) -> Any:
        """Whatever is random is drawn from the training's generators."""
        return _load(self._task, wanted)

    def close(self) -> None:
        """Nothing was opened."""


class WorkerLoader:
    """``num_workers`` processes load what is expected, while the training one trains."""

    def __init__(self, task: Task, *, name: str, num_workers: int) -> None:
        """``name``: by which the task was asked for. Raises ConfigError for a task whose samples
        cannot be sent to another process.
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
        """Load those, and none that were expected of the same samples before."""
        for _, batch in self._ahead[held_out]:
            batch.cancel()
        self._coming[held_out], self._ahead[held_out] = iter(coming), deque()
        self._go_on(held_out)

    def load(self, wanted: BatchRequest) -> Any:
        """One that was not expected takes its time."""
        ahead = self._ahead[wanted.held_out]
        if not ahead or ahead[0][0] != wanted:
            return self._await(self._submit(wanted))
        _, batch = ahead.popleft()
        self._go_on(wanted.held_out)
        return self._await(batch)

    def close(self) -> None:
        """Without waiting for what is under way: the processes end in its midst."""
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
    """The loading of a run of the task that was asked for as ``name``; without workers its own."""
    if not num_workers:
        return InlineLoader(task)
    return WorkerLoader(task, name=name, num_workers=num_workers)


def _load(task: Task, wanted: BatchRequest) -> Any:
    data = task.eval_data if wanted.held_out else task.train_data
    assert data is not None
    return load_batch(task, data, wanted.indices)


def _pack(task: Task, num_workers: int) -> bytes:
    """What a worker needs of ``task``. By torch, which writes memory that samples share once."""
    nothing: Any = None
    needed = replace(
        task, model=nothing, loss=nothing, metrics=None, summarize=None, notes=(), defaults={}
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
    """What is started inside never gets the signals that ask a run to stop; this process gets
    those that come meanwhile afterwards.
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
    threading.Thread(target=_end_when_told, args=(heard,), daemon=True).start()
    torch.set_num_threads(1)
    prepare_to_load(name)
    _served = torch.load(io.BytesIO(packed), weights_only=False)


def _end_when_told(heard: connection.Connection) -> None:
    """Or when the rank has ended, however: nobody else would end this process, which is deaf to
    signals, at whatever it is. All processes listen to one pipe, so nobody reads.
    """
    rank = parent_process()
    assert rank is not None
    connection.wait([rank.sentinel, heard])
    os._exit(1)


def _load_seeded(wanted: BatchRequest) -> Any:
    assert _served is not None
    seed_all(*wanted.seed)
    return _load(_served, wanted)
