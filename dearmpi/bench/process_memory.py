"""Memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from pathlib import Path

from dearmpi.engine.bucket.buffers import give_back_freed

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_NEVER = 2**31 - 1
_LARGE, _MANY = 1 << 20, 1 << 16


def reuse_pages() -> None:
    """Let freed memory stay with the process and be used again, where the C library can.

    An accelerator's allocator does so. Otherwise every gradient of a replayed model costs a page
    fault for each 4 KiB. On a virtual machine these may take longer than the communication.
    """
    _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER})


def give_back_large() -> None:
    """Let what is larger than a megabyte go back to the system once it is freed.

    Tensors of many sizes that come and go leave holes in what ``reuse_pages`` keeps.
    """
    _set({_MMAP_THRESHOLD: _LARGE, _MMAP_MAX: _MANY})


def _set(values: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)


def start_peak() -> int:
    """Give back what is free, forget the peak, and return the bytes in use now."""
    gc.collect()
    give_back_freed()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return 0
    return _read("VmRSS")


def peak_bytes(start: int) -> int | None:
    """Most bytes in use at once since ``start_peak`` returned ``start``, beyond those.

    None where the system does not tell.
    """
    return _read("VmHWM") - start if start else None


def _read(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 if there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    values = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(values, "0")) * 1024
