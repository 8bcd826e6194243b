"""Batch script: one of the files in slurm/, with numbers and arguments of its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

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
            f"time is {limit!r}, which sbatch does not take; write minutes, or [D-]HH:MM:SS",
            code="malformed-value",
        )
    seconds = sum(int(number or 0) * _UNITS[unit] for unit, number in found.groupdict().items())
    if warned and 0 < seconds <= WARNING_S:  # 0 asks for no limit
        raise ConfigError(
            f"time is {limit}, {seconds} s, but the job is told to save and stop {WARNING_S} s "
            "before its end: it would come no further than a step. Give it more, or a later "
            "warning, as in --sbatch-option signal=B:USR1@20",
            code="out-of-range",
        )


Launcher = Literal["mpirun", "srun"]
_FILES: Mapping[Launcher, str] = {"mpirun": "train.sbatch", "srun": "train-srun.sbatch"}

# sbatch takes one or the other.
_EXCLUDED: Mapping[str, str] = {"ntasks-per-gpu": "ntasks-per-node"}
# Nor does it take this beside the files' cpus-per-task, which says how many threads a rank has.
_CORES_OF_DEVICES = "cpus-per-gpu"

_NAME = re.compile(r"[a-z][a-z-]*")
_VALUE = re.compile(r"[\w.,:+@%/=()\[\]|&*!?~-]+")
_AFTER_OPTIONS = "set -eu\n"
_BEFORE_ARGUMENTS = "trap '' USR1 # until dear-train listens\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """A job for sbatch.

    options: sbatch's, by their long names; None for those without a value, such as exclusive.
    arguments: of ``dear-train run``.
    environment: folder of the Python environment, used unless DEARMPI_VENV names another.

    Raises ConfigError for an option that sbatch would read as something else or does not take
    beside the files' own, and for a time limit that it would not take or in which no step is made.
    """

    launcher: Launcher
    options: Mapping[str, str | None]
    arguments: Sequence[str]
    environment: str

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is no option of sbatch; give its long name, without dashes",
                    code="unknown-sbatch-option",
                )
            if value is not None and not _VALUE.fullmatch(value):
                raise ConfigError(
                    f"{name} is {value!r}, which cannot stand in a batch script; use letters, "
                    "digits and . , : + @ % / = ( ) [ ] | & * ! ? ~ - _",
                    code="malformed-value",
                )
        if _CORES_OF_DEVICES in self.options:
            raise ConfigError(
                f"{_CORES_OF_DEVICES} gives cores to devices, but here ranks have them, and sbatch "
                "takes one or the other; give --cpus-per-task, the cores of a rank",
                code="settings-contradict",
            )
        if self.options.get("time"):
            check_time_limit(str(self.options["time"]), warned="signal" not in self.options)

    def render(self) -> str:
        """The script's text: the file's, with these options in the place of its own, and the
        arguments before those that sbatch may be given after the script.
        """
        text = (files("dearmpi") / "slurm" / _FILES[self.launcher]).read_text(encoding="utf-8")
        for name in (*self.options, *(_EXCLUDED.get(name, name) for name in self.options)):
            text = re.sub(rf"^#SBATCH --{name}(=.*)?\n", "", text, flags=re.MULTILINE)
        lines = "".join(f"#SBATCH --{_written(*item)}\n" for item in self.options.items())
        own = f"DEARMPI_VENV=${{DEARMPI_VENV:-{shlex.quote(self.environment)}}}\n"
        own += f'set -- {shlex.join(self.arguments)} "$@"\n' if self.arguments else ""
        head, set_up, rest = text.partition(_AFTER_OPTIONS)
        before, found, after = rest.partition(_BEFORE_ARGUMENTS)
        assert set_up and found, f"{_FILES[self.launcher]} lacks a line to write something beside"
        return head + lines + set_up + before + found + own + after


def _written(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"
