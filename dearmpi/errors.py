"""Every error that dearmpi raises on purpose.

DearError
├── ConfigError          a setting, flag or argument is wrong (also a ValueError)
│   ├── ArgumentError    a function has no such argument (also a TypeError)
│   └── TaskError        the task, its model or its optimizer cannot be built
├── LaunchError          the job was started in a way that cannot work
├── MismatchError        ranks differ in code, arguments, model or plan
├── DataError            training data is missing, empty or unreadable
├── CheckpointError      a checkpoint is damaged, or belongs to another model
├── MeasurementError     times were measured by which nothing can be decided
├── NonFiniteLossError   loss, gradient or parameter is NaN or infinite
├── DeviceError          a device or its host has no memory left for what a rank needs
├── UsageError           the engine was called in an order that has no meaning
└── CommError            a collective failed, with rank, host and operation
    ├── StallError       an operation made no progress within its limit
    ├── ReplicaMismatchError   ranks no longer train alike (also a MismatchError)
    └── WireRangeError   a number is beyond the format in which it was to travel

``exit_code`` is what ``dear-train`` ends with; docs/how-to/run.md lists them. ``code`` names
the fault, such as ``params-moved``; ``error_codes.py`` holds the cause and the cure of each.
"""

from __future__ import annotations

UNNAMED = "unnamed"  # the code of an error that was made without one


class DearError(Exception):
    """Base of all errors raised by dearmpi; the message says what happened and what to do.

    code: one of ``error_codes.CODES``; messages may change between versions, codes do not.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, code: str = UNNAMED) -> None:
        super().__init__(message)
        self.code = code

    def with_code(self) -> str:
        """The message, and the code by which the reference of errors is searched."""
        return str(self) if self.code == UNNAMED else f"{self} [{self.code}]"


class ConfigError(DearError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""

    exit_code = 2


class ArgumentError(ConfigError, TypeError):
    """A function was given an argument that it does not have; the message names the right one."""


class TaskError(ConfigError):
    """The task, its model or its optimizer cannot be built from what was asked for."""


class LaunchError(DearError):
    """The processes were started in a way that cannot work, such as N jobs of size 1."""

    exit_code = 3


class MismatchError(DearError):
    """Ranks that must agree do not."""

    exit_code = 4


class DataError(DearError):
    """Training data is missing, empty or unreadable."""

    exit_code = 5


class CheckpointError(DearError):
    """A checkpoint cannot be read, or does not fit this run; or a run folder cannot be written."""

    exit_code = 6


class MeasurementError(DearError):
    """Measured times contradict each other so much that nothing can be decided by them."""


class NonFiniteLossError(DearError):
    """The loss, a gradient or a parameter became NaN or infinite."""

    exit_code = 7


class DeviceError(DearError, RuntimeError):
    """A device, or its host, has no memory left for what this rank needs."""


class UsageError(DearError, RuntimeError):
    """The engine was called in an order that has no meaning."""


class CommError(DearError, RuntimeError):
    """A collective operation failed."""

    exit_code = 8

    def __init__(
        self, message: str = "", *, code: str = UNNAMED, exit_code: int | None = None
    ) -> None:
        """exit_code: that of what ended a rank or an operation, where it has one of its own."""
        super().__init__(message, code=code)
        if exit_code is not None:
            self.exit_code = exit_code


class StallError(CommError):
    """An operation made no progress within its time limit."""


class ReplicaMismatchError(CommError, MismatchError):
    """Ranks that began alike no longer are, as they tell each other in each step: what they train,
    how often they have reduced gradients, which states they have loaded, their learning rates.
    """

    exit_code = 4


class WireRangeError(CommError):
    """A number is beyond what the format holds in which it was to travel, or is no number."""

    exit_code = 7
