"""Batch script: one of the files in slurm/, with numbers and arguments of its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from dearmpi.cli.time_limit import check_time_limit
from dearmpi.errors import ConfigError

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
                    f"{name!r} is no option of sbatch; give its long name, without dashes"
                )
            if value is not None and not _VALUE.fullmatch(value):
                raise ConfigError(
                    f"{name} is {value!r}, which cannot stand in a batch script; use letters, "
                    "digits and . , : + @ % / = ( ) [ ] | & * ! ? ~ - _"
                )
        if _CORES_OF_DEVICES in self.options:
            raise ConfigError(
                f"{_CORES_OF_DEVICES} gives cores to devices, but here ranks have them, and sbatch "
                "takes one or the other; give --cpus-per-task, the cores of a rank"
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
