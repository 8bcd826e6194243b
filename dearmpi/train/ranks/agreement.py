"""Agreement: a failure on any rank becomes the same failure on all of them.

Inside ``together`` each rank works alone; at its end all ranks learn which ranks failed. So no rank
waits for one that has given up, and one rank can report for all.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dearmpi.errors import DearError, MismatchError, NonFiniteLossError


class TextWorld(Protocol):
    """A rank's place, and an exchange with the others."""

    @property
    def rank(self) -> int: ...

    @property
    def host(self) -> str: ...

    def all_gather_text(self, text: str, /) -> list[str]: ...


_LONGEST = 8_000  # characters of a failure that all ranks receive: each holds every rank's
_MOST_FAILURES = 8  # reported one by one


class AgreeingWorld(TextWorld, Protocol):
    """What an agreement needs of the world."""

    @property
    def size(self) -> int: ...


class AgreedError(DearError):
    """A failure that all ranks know of: each raises it at the same place.

    The cause, on a rank that failed itself, is its own exception.
    """

    def __init__(self, message: str, *, exit_code: int, code: str = "unnamed") -> None:
        super().__init__(message, code=code)
        self.exit_code = exit_code


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises ``error``, so that no rank is left waiting."""
    return isinstance(error, (AgreedError, MismatchError, NonFiniteLossError))


@contextmanager
def together(world: AgreeingWorld, *, root_only: bool = False) -> Iterator[None]:
    """Run a part that may fail on some ranks only (collective at its end).

    The part must make no collective calls itself. ``root_only``: only rank 0 works, so messages
    leave out the rank. Raises AgreedError on every rank if it failed on any, with the exit
    code of the first that did.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    share_failure(world, failure, root_only=root_only)


def share_failure(
    world: AgreeingWorld, failure: Exception | None, *, root_only: bool = False
) -> None:
    """Raise AgreedError on every rank if any gives a ``failure`` (collective)."""
    own = ""
    if failure is not None:
        report = [*_codes(failure), _shorten(explain(failure)), world.host]
        own = json.dumps(report, ensure_ascii=False)
    gathered = world.all_gather_text(own)
    failed = {rank: json.loads(text) for rank, text in enumerate(gathered) if text}
    if failed:
        exit_code, code, *_ = next(iter(failed.values()))
        message = _summarize(failed, num_working=1 if root_only else world.size)
        raise AgreedError(message, exit_code=exit_code, code=code) from failure


def explain(error: BaseException) -> str:
    """The message of a DearError; the traceback of any other error."""
    if isinstance(error, DearError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _shorten(text: str) -> str:
    """The two ends of a long ``text``, which hold the place of a failure and its kind."""
    num_cut = len(text) - _LONGEST
    if num_cut <= 0:
        return text
    half = _LONGEST // 2
    remark = f"[... {num_cut} characters are cut here; the log of the rank that failed has all ...]"
    return f"{text[:half]}\n{remark}\n{text[-half:]}"


def _codes(error: Exception) -> tuple[int, str]:
    """Exit code and error code."""
    if isinstance(error, DearError):
        return error.exit_code, error.code
    return 1, "unforeseen-failure"


def _summarize(failed: dict[int, tuple[int, str, str, str]], *, num_working: int) -> str:
    """One message for ranks that failed alike; ranks are named unless all working ranks failed."""
    by_message: dict[str, list[str]] = {}
    for rank, (*_, message, host) in failed.items():
        by_message.setdefault(message, []).append(f"rank {rank} on {host}")
    if len(by_message) == 1 and len(failed) == num_working:
        return next(iter(by_message))
    shown = list(by_message.items())[:_MOST_FAILURES]
    lines = [f"{_abbreviate(places)}: {message}" for message, places in shown]
    num_more = len(failed) - sum(len(places) for _, places in shown)
    if num_more:
        lines.append(f"and {num_more} more ranks failed in other ways; see their logs")
    return "\n".join(lines)


def _abbreviate(places: list[str], most: int = 4) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
