"""Memory that was freed but stays with the process."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Let the system have what was freed, where the C library can (glibc).

    A model's tensors lie among objects that live on, so that what they leave behind is of no use
    to large buffers and would count twice.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
