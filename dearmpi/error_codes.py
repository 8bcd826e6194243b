"""Error codes: every fault that dearmpi reports, with its cause and its cure.

``DearError.code`` is a key of ``CODES``. The reference of errors is generated from this file, which
nothing imports while a program runs. A code is two to four words in lower case, joined by hyphens.
It names the fault rather than the place. One code serves all places that report the same fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """What a code means: one sentence of cause, one of cure, for people who look it up."""

    cause: str
    cure: str


_SETTINGS = {
    "unnamed": ErrorCode(
        "A program raised the error without a code.",
        "Read the message; dearmpi itself always gives a code.",
    ),
    "unknown-choice": ErrorCode(
        "A setting has a value that is none of its choices.",
        "Choose one of the values that the message lists.",
    ),
    "wrong-type": ErrorCode(
        "A setting or an argument has a value of the wrong type.",
        "Give a value of the type that the message names.",
    ),
    "out-of-range": ErrorCode(
        "A number lies outside the range that its setting allows.",
        "Give a number within the range that the message states.",
    ),
    "settings-contradict": ErrorCode(
        "Two settings exclude each other.",
        "Change or remove one of the two settings that the message names.",
    ),
    "unknown-argument": ErrorCode(
        "A function was called with an argument of another library's interface.",
        "Use the argument or method that the message names instead.",
    ),
}

_COMM: dict[str, ErrorCode] = {}

_ENGINE: dict[str, ErrorCode] = {}

_PLAN: dict[str, ErrorCode] = {}

_TRAIN: dict[str, ErrorCode] = {
    "unforeseen-failure": ErrorCode(
        "A rank failed with an exception that dearmpi does not raise itself.",
        "Read the traceback in that rank's log; the cause is often in the task's own code.",
    ),
}

_TOOLS: dict[str, ErrorCode] = {}  # bench, report, doctor, tune and the command line

CODES: dict[str, ErrorCode] = {**_SETTINGS, **_COMM, **_ENGINE, **_PLAN, **_TRAIN, **_TOOLS}
