"""Interrupts: what Ctrl-C does while modules are imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130


@contextmanager
def loading() -> Iterator[None]:
    """Inside, Ctrl-C ends this process at once with status 130.

    Python would print where it was in its imports, and end so late that MPICH's launcher kills it.
    The launcher then joins the codes of SIGINT and SIGKILL to that of a segmentation fault.
    A handler of the caller's own stays.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> NoReturn:
    os._exit(INTERRUPTED)
