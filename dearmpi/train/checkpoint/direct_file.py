"""Direct file: a new file whose blocks go to the disk past the kernel's page cache.

Copying into that cache costs several times the CPU time of computing checksums, and a checkpoint
that nobody reads soon would only push out what is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

BLOCK_BYTES = 4096  # what disks and file systems ask memory, place and size to be multiples of


class DirectFile:
    """The new file at ``path``; a context manager, at whose regular end all is on the disk.

    Raises OSError when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, as far as it is whole blocks past the cache, where the system can.

        That needs ``data`` to begin at a multiple of BLOCK_BYTES in memory and in the file.
        """
        view = memoryview(data)
        num_whole = len(view) - len(view) % BLOCK_BYTES
        if num_whole and self._set_direct(wanted=True):
            try:
                written = os.write(self._descriptor, view[:num_whole])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                written = 0  # some part of the system asks for more than whole blocks
            view = view[written:]
        self._set_direct(wanted=False)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _set_direct(self, *, wanted: bool) -> bool:
        """Whether writes now go past the cache, which not every file system can."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT * wanted)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted
