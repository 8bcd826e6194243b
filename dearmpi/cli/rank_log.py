"""Rank log: warnings and exceptions of one rank, in a file of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dearmpi.comm.api import safe_output
from dearmpi.errors import DearError


@dataclass(slots=True)
class RankLog:
    """Where this rank's warnings and exceptions go.

    path: the log's file; None until ``open``.
    """

    logger: logging.Logger
    path: Path | None = None

    def open(self, path: Path, first_line: str) -> None:
        """Also write to the file at ``path``, from here on. Raises DearError where that fails."""
        try:
            handler = _LogFile(path, mode="a", encoding="utf-8")
        except OSError as error:
            raise DearError(f"cannot write {path}: {error.strerror}") from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        self.path = path
        self.logger.info(first_line)

    def write_exception(self, error: BaseException) -> None:
        """Write ``error`` with its traceback."""
        if self.path is not None:
            self.logger.error("%s", error, exc_info=error)


class _LogFile(logging.FileHandler):
    """A file of which a rank's end does not depend: that it cannot be written is told, once."""

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a mistake in who called
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            safe_output.write(
                f"dear-train: warning: cannot write {self.baseFilename}: {error.strerror}; what "
                "follows may be missing there"
            )

    def close(self) -> None:
        with suppress(OSError):  # of what is left to write
            super().close()


@contextmanager
def rank_log(*, speaks: bool) -> Iterator[RankLog]:
    """Inside, warnings are logged; where ``speaks``, they are told on the console as well.

    Logging is one for the whole process; it is put back as it was at the end.
    """
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr) if speaks else logging.NullHandler()
    )
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.exc_info is None)  # failures are told in another way
    root.addHandler(handler)
    logger = logging.getLogger("dearmpi")
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield RankLog(logger)
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for added in [other for other in root.handlers if other not in before]:
            root.removeHandler(added)
            added.close()
