"""Call: one collective call of the world or of an optimizer, which ranks compare, and where in the
program a thread is.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

_CURES = {
    "state_dict": "call state_dict() on every rank, and write the file on rank 0",
    "clip_grad_norm_": (
        "call clip_grad_norm_() on every rank, with the same numbers, and log the norm on rank 0"
    ),
    "join()": "write with optimizer.join(): on every rank, around the same loop",
}
_CURE = "make the same collective calls on every rank, in the same order, with as many values"


def cure_for(*calls: str) -> str:
    """What to do if ranks are in different ones of ``calls``."""
    return next((_CURES[key] for call in calls for key in _CURES if key in call), _CURE)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's collective call.

    name: the call in the script, such as ``optimizer.state_dict()``.
    operation: the exchange that it makes; ranks must agree on both.
    thread: the thread that waits for it, whose stack shows the place of the call.
    job_ranks: the index within the job of each rank that makes it; none: they are the job's.
    """

    name: str
    operation: str
    thread: int
    job_ranks: Sequence[int] = ()

    def __str__(self) -> str:
        return self.name if self.name == self.operation else f"{self.name} ({self.operation})"

    @property
    def digest(self) -> bytes:
        """An eight-byte hash of name and operation."""
        return hashlib.blake2b(str(self).encode(), digest_size=8).digest()

    def describe(self) -> str:
        """The call and its place in the script."""
        stack = stack_of(self.thread)
        place = stack[-1].rpartition(" ")[0] if stack else "an unknown place"
        return f"{self}, called at {place}"


_NUM_FRAMES = 6
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_NAME = os.path.basename(_PACKAGE)
_HIDDEN = (_PACKAGE, threading.__file__, contextlib.__file__)
_LIBRARIES = tuple(f"site-packages{os.sep}{name}{os.sep}" for name in ("torch", "click"))
_NOT_THE_USERS = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_LOOK = threading.RLock()  # a signal's handler may look while its thread does


def stack_of(thread: int) -> tuple[str, ...]:
    """The innermost frames of ``thread``, without frames of this package, of torch and of click.

    Does not read source files, which may lie on a disk that does not answer.
    """
    innermost = frames_of_threads().get(thread)
    if innermost is None:  # it has ended
        return ()
    frames = [(frame.f_code, line) for frame, line in traceback.walk_stack(innermost)][::-1]
    own = [
        (code, line)
        for code, line in frames
        if not code.co_filename.startswith(_HIDDEN)
        and not any(library in code.co_filename for library in _LIBRARIES)
    ]
    shown = (own or frames)[-_NUM_FRAMES:]
    handlers = _handlers()
    return tuple(
        f"{code.co_filename}:{line} {code.co_name}{_handles(handlers.get(code))}"
        for code, line in shown
    )


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's number.

    Before Python 3.11.9 this holds the lock under which threads begin and end. A collection of
    garbage meanwhile lets other threads run; one that begins or ends would stop all for ever.
    """
    with _LOOK:
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if is_collecting:
                gc.enable()


def signal_handled() -> str:
    """The signal whose handler made this call, such as ``SIGUSR1``; empty outside of handlers."""
    handlers = _handlers()
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((handlers[code] for code in codes if code in handlers), "")


def _handlers() -> dict[CodeType, str]:
    """The signal of each handler that is a function or a method."""
    found = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if isinstance(code, CodeType):
            found[code] = signal.Signals(number).name
    return found


def _handles(name: str | None) -> str:
    return f" (handler of {name})" if name else ""


def origin_of(error: BaseException) -> str:
    """The innermost place of the user's own code in the traceback of ``error``; empty without one.

    Such as "train.py:41, in main"; a place in a library if no frame is the user's.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    shown = ([(frame, line) for frame, line in frames if _is_users(frame)] or frames)[-1:]
    return "".join(
        f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}" for frame, line in shown
    )


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path == "<string>":  # perhaps the constructor of one of this package's dataclasses
        return not str(frame.f_globals.get("__name__")).startswith(f"{_NAME}.")
    return _INSTALLED not in path and not path.startswith(_NOT_THE_USERS)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """Ranks as ranges, with the names of up to three hosts: ``ranks 0, 2-5 (node1)``.

    hosts: of every rank.
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    names = sorted({hosts[rank] for rank in ranks})
    where = f" ({', '.join(names)})" if len(names) <= 3 else f" ({len(names)} hosts)"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{where}"
