"""Failure: how a run that cannot go on ends, so that its first cause is the one that is seen."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.stack import origin_of
from dearmpi.comm.process.launch import announced_rank, announced_size
from dearmpi.errors import UNNAMED, ConfigError, DearError, LaunchError

if TYPE_CHECKING:
    pass

INTERRUPTED = 130


def exit_code(error: BaseException) -> int:
    """What the process ends with."""
    if isinstance(error, DearError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return _status(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def complain_alone(error: DearError) -> None:
    """Tell of ``error`` where there is no world in which to agree on who does.

    Wrong settings and a wrong launch are met by every rank, and told by the first of them; anything
    else may be met by one alone.
    """
    if announced_size(os.environ) > 1 and not isinstance(error, (ConfigError, LaunchError)):
        complain(_told(error), prefix=f"{process_name()} ")
    elif is_first_process():
        complain(_told(error))


def complain(message: str, *, prefix: str = "dear-train: ") -> None:
    """Print ``message`` on standard error, each line with ``prefix``, at once."""
    safe_output.flush()
    safe_output.write("\n".join(f"{prefix}{line}" for line in message.splitlines()))


def describe(error: BaseException, log: Path | None) -> str:
    """The message of an error raised on purpose; of any other also where it came from."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, DearError):
        return _told(error)
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


def _told(error: DearError) -> str:
    """The message, and the code by which the reference of errors is searched."""
    code = "" if error.code == UNNAMED else f" [{error.code}]"
    return f"error: {error}{code}"


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
