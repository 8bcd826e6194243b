"""Time limit: of a job, in the words of sbatch."""

from __future__ import annotations

import re

from dearmpi.errors import ConfigError

_NONE = ("-1", "INFINITE", "UNLIMITED")
_FORMS = (
    r"(?P<minutes>\d+)",
    r"(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
WARNING_S = 120  # --signal of the scripts


def check_time_limit(limit: str, *, warned: bool) -> None:
    """Raise ConfigError for a limit that sbatch would not take, or in which no step is made.

    warned: whether the job is warned as long before its end as the scripts ask for.
    """
    if limit.upper() in _NONE:
        return
    found = next(filter(None, (re.fullmatch(form, limit) for form in _FORMS)), None)
    if found is None:
        raise ConfigError(
            f"time is {limit!r}, which sbatch does not take; write minutes, or [D-]HH:MM:SS"
        )
    seconds = sum(int(number or 0) * _UNITS[unit] for unit, number in found.groupdict().items())
    if warned and 0 < seconds <= WARNING_S:  # 0 asks for no limit
        raise ConfigError(
            f"time is {limit}, {seconds} s, but the job is told to save and stop {WARNING_S} s "
            "before its end: it would come no further than a step. Give it more, or a later "
            "warning, as in --sbatch-option signal=B:USR1@20"
        )
