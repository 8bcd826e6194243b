"""Endings: a command that all ranks carry out, and how it ends where it cannot go on. Its first
cause is the one that is seen.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dearmpi.cli.console import Console
from dearmpi.cli.interrupts import INTERRUPTED
from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import origin_of
from dearmpi.comm.process import announced_rank, report_alone
from dearmpi.errors import CommError, DearError

if TYPE_CHECKING:
    from dearmpi.comm.watchdog.watchdog import StallLimits
    from dearmpi.comm.world import World
    from dearmpi.config import ProgressMode

# A rank whose communication broke was likely left by another, which will say why.
_GRACE_OF_VICTIMS_S = 3.0
# Where all ranks fail alike, rank 0 says it for them and ends the job meanwhile.
_GRACE_OF_OTHERS_S = 1.0


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
            raise DearError(
                f"cannot write {path}: {error.strerror}", code="cannot-write"
            ) from error
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
    own_level = logger.level
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield RankLog(logger)
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        logger.setLevel(own_level)
        for added in [other for other in root.handlers if other not in before]:
            root.removeHandler(added)
            added.close()


def on_ranks(
    carry_out: Callable[[World, RankLog], int],
    *,
    connect: Callable[[], World],
    failure: DearError | None = None,
) -> int:
    """``connect`` the ranks and ``carry_out`` a command on all of them, or tell once of a
    ``failure`` that this rank has met before. Returns the exit code.
    """
    from dearmpi.train.ranks.agreement import share_failure

    try:
        world = connect()
    except DearError as error:
        first = failure or error
        report_alone(first, prefix="dear-train: ")
        return exit_code(first)
    with rank_log(speaks=world.is_root) as log:
        try:
            share_failure(world, failure)
            return carry_out(world, log)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and exit_code(error) == 0:
                raise  # as a program does that has come to its end
            return end_run(world, error, log)


def end_run(world: World, error: BaseException, log: RankLog) -> int:
    """Tell of ``error`` and return the exit code, or end the whole job where others may wait."""
    from dearmpi.train.ranks.agreement import is_agreed

    log.write_exception(error)
    code = exit_code(error)
    if is_agreed(error) or world.size == 1:
        if world.is_root:
            complain(describe(error, log.path))
        return code
    if isinstance(error, CommError):
        time.sleep(_GRACE_OF_VICTIMS_S)
    elif not world.is_root:
        time.sleep(_GRACE_OF_OTHERS_S)
    complain(describe(error, log.path), prefix=f"[rank {world.rank} on {world.host}] ")
    world.abort(code)


def measure_together(
    measure: Callable[[World, Console], int],
    *,
    stall_limits: StallLimits | None = None,
    progress: ProgressMode | None = None,
) -> int:
    """Connect the ranks and call ``measure`` on all; a failure ends as that of a run.

    Returns the exit code.
    """
    from dearmpi.comm.lifecycle import connect

    def carry_out(world: World, _log: RankLog) -> int:
        return measure(world, Console(speaks=world.is_root, launched=world.size > 1))

    return on_ranks(carry_out, connect=partial(connect, progress, stall_limits=stall_limits))


def exit_code(error: BaseException) -> int:
    """What the process ends with."""
    if isinstance(error, DearError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return _status(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def complain(message: str, *, prefix: str = "dear-train: ") -> None:
    """Print ``message`` on standard error, each line with ``prefix``, at once."""
    safe_output.flush()
    safe_output.write("\n".join(f"{prefix}{line}" for line in message.splitlines()))


def describe(error: BaseException, log: Path | None) -> str:
    """The message of an error raised on purpose; of any other also where it came from."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, DearError):
        return f"error: {error.with_code()}"
    if isinstance(error, SystemExit):
        where = "" if log is None else f"; the traceback is in {log}"
        return (
            f"error: ended itself, and with it the job, by sys.exit({error.code!r}) "
            f"({origin_of(error)}){where}"
        )
    if log is None:
        return "error: " + "".join(traceback.format_exception(error)).rstrip()
    message = "".join(traceback.format_exception_only(error)).rstrip()
    return f"error: {message} ({origin_of(error)}); the traceback is in {log}"


def is_first_process() -> bool:
    """Whether the launcher calls this process rank 0; so does a process without a launcher."""
    return announced_rank(os.environ) == "0"


def process_name() -> str:
    """``[rank 1 on n2]``, as the launcher calls this process."""
    return f"[rank {announced_rank(os.environ)} on {os.uname().nodename}]"


def _status(error: SystemExit) -> int:
    """What a process ends with by ``error``: as in Python, 1 where a message is given."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    return 1
