"""dear-train slurm: a batch script for given numbers, printed or submitted.

The script is one of the files in slurm/, with numbers and arguments of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import click

from dearmpi.cli.endings import complain
from dearmpi.cli.flags import Choice
from dearmpi.cli.run import check_config, read_sources, run
from dearmpi.errors import ConfigError, LaunchError
from dearmpi.plan.data.plan import read_plan
from dearmpi.plan.data.plan_choice import check_plan
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.settings.sources import Source, merge
from dearmpi.train.tasks.task import check_task_name

Launcher = Literal["mpirun", "srun"]
_FILES: Mapping[Launcher, str] = {"mpirun": "train.sbatch", "srun": "train-srun.sbatch"}
_NO_FILES = ("auto", "none", "bayes")  # of --plan and --resume
_COUNT = click.IntRange(min=1)


class _SlurmCommand(click.Command):
    """Says where an option belongs that is one of ``dear-train run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As the base class."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if not any(name in (*param.opts, *param.secondary_opts) for param in run.params):
                raise
            raise click.UsageError(
                f"{name} is an option of dear-train run; write all of those after --, as in "
                f"dear-train slurm --nodes 2 -- {name} ...",
                ctx,
            ) from error


@click.command(cls=_SlurmCommand, short_help="Print a SLURM batch script for a run, or submit it.")
@click.option("--nodes", type=_COUNT, metavar="N", help="nodes; default: sbatch's, mostly 1")
@click.option("--ntasks-per-node", type=_COUNT, metavar="N", help="ranks per node; default: 2")
@click.option(
    "--cpus-per-task",
    type=_COUNT,
    metavar="N",
    help="cores per rank, and torch threads, from four on less one; default: 1",
)
@click.option("--time", metavar="[D-]HH:MM:SS", help="limit, above 2 minutes; default: 01:00:00")
@click.option("--partition", metavar="NAME", help="queue; default: the site's")
@click.option("--account", metavar="NAME", help="what the job is charged to")
@click.option("--job-name", metavar="NAME", help="default: dear-train")
@click.option(
    "--sbatch-option",
    "others",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="any other of sbatch, such as exclusive or mem=16G; may be repeated",
)
@click.option(
    "--launcher",
    type=Choice(get_args(Launcher)),
    default="mpirun",
    show_default=True,
    help="what starts the ranks inside the job",
)
@click.option("--submit", is_flag=True, help="hand it to sbatch rather than print it")
@click.argument("arguments", nargs=-1, metavar="[-- ARGS...]", type=click.UNPROCESSED)
def slurm(
    *,
    others: tuple[str, ...],
    launcher: Launcher,
    submit: bool,
    arguments: tuple[str, ...],
    **given: object,
) -> None:
    """Print a batch script that trains with ARGS: the arguments of `dear-train run`, or a command
    of your own. It saves before its time is up or when it is preempted, and queues again to go on;
    a script of your own does so with dearmpi.Run.

    \b
      dear-train slurm --nodes 2 --ntasks-per-node 4 -- --task digits >job.sbatch
      dear-train slurm --nodes 2 --time 12:00:00 --submit -- --task digits
      dear-train slurm --nodes 2 -- python script.py --its-own flags
    """
    options: dict[str, str | None] = {
        name.replace("_", "-"): str(value) for name, value in given.items() if value is not None
    }
    options |= _parse_others(others, taken=options)
    folder = Path.cwd() / (options.get("chdir") or "")  # in which the job will run
    missing = list(_check_arguments(arguments, folder))
    script = BatchScript(
        launcher=launcher, options=options, arguments=arguments, environment=sys.prefix
    )
    _tell_missing(missing, folder, submit=submit)
    click.echo(_submit(script) if submit else script.render(), nl=submit)


def _check_arguments(arguments: tuple[str, ...], folder: Path) -> Iterator[str]:
    """Refuse now what ``dear-train run`` would refuse once the job had left the queue. Returns what
    it, or a command of one's own, would miss if it ran in ``folder`` now.
    """
    if is_own_command(arguments):
        script = next((word for word in arguments if word.endswith(".py")), None)
        is_there = script is None or os.path.isfile(folder / script)
        return iter(() if is_there else [f"there is no file {folder / str(script)}"])
    given = run.make_context("dear-train run", list(arguments)).params
    config = given.pop("config")
    check_config(config)
    is_here = config is not None and os.path.isfile(folder / config)
    sources = read_sources(given, os.environ, str(folder / config) if is_here else None)
    _check_task(sources)
    if config is None or is_here:  # it may give more, and need not be here yet
        _check_combination(merge(sources), folder)
    return _missing_files(config, sources, folder)


def is_own_command(arguments: Sequence[str]) -> bool:
    """Whether ``arguments`` are a command; those of ``dear-train run`` begin with a flag."""
    return bool(arguments) and not arguments[0].startswith("-")


def _check_task(sources: Sequence[Source]) -> None:
    """Raise TaskError for a task that there is not; of one's own, the node may have the module."""
    for source in sources:
        task = source.values.get("task")
        if task is not None:
            check_task_name(task)
            return  # those that follow are overruled


def _missing_files(config: str | None, sources: Sequence[Source], folder: Path) -> Iterator[str]:
    """For each file that is given, a line if there is none at its path."""
    if config is not None and not os.path.isfile(folder / config):
        yield f"--config is {config}, and there is no file {folder / config}"
    for name in ("task", "optimizer", "plan", "resume"):
        for source in sources:
            given = source.values.get(name)
            if given is not None:
                path = _file_named(name, given, folder)
                if path is not None and not (path.is_file() or name == "resume" and path.is_dir()):
                    what = "checkpoint" if name == "resume" else "file"
                    yield f"{source.label(name)} is {given}, and there is no {what} {path}"
                break  # those that follow are overruled


def _file_named(name: str, given: str, folder: Path) -> Path | None:
    """What the setting ``name`` would look for; None if ``given`` is no path."""
    if name in ("task", "optimizer"):
        path = folder / Path(given.rpartition(":")[0]).expanduser()
        return path if path.suffix == ".py" else None
    return None if given in _NO_FILES else folder / given


def _tell_missing(missing: Sequence[str], folder: Path, *, submit: bool) -> None:
    """Raise ConfigError for files that a job to ``submit`` would miss; a script to be printed may
    be meant for another machine.
    """
    if submit and missing:
        raise ConfigError(
            f"{'; '.join(missing)}; a job submitted here runs in {folder}: correct the path, or "
            "leave out --submit where the file is yet to come",
            code="file-missing",
        )
    for one in missing:
        complain(f"warning: {one}; there must be one where the job runs, or it ends at its start")


def _check_combination(chosen: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError where settings contradict each other, whatever the task recommends: that
    may be steps of the learning rate, of which the user gives details. A plan that is here already
    must be one.
    """
    settings = RunSettings(**{"lr_schedule": "step", **chosen})
    plan = settings.plan if settings.plan not in ("none", "bayes") else None
    if plan not in (None, "auto") and os.path.isfile(folder / plan):
        read_plan(folder / plan)
    check_plan(plan, settings.engine())


def _parse_others(words: tuple[str, ...], *, taken: Container[str]) -> dict[str, str | None]:
    parsed: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name in parsed or name in taken:
            raise ConfigError(
                f"sbatch's option {name} is given twice; give it once", code="given-twice"
            )
        parsed[name] = value if equals else None
    return parsed


def _submit(script: BatchScript) -> str:
    """Hand ``script`` to sbatch; returns what it says. Raises LaunchError where it refuses."""
    try:
        done = subprocess.run(
            ["sbatch"], input=script.render(), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"cannot start sbatch: {error.strerror}; submit from a login node of the cluster, or "
            "leave out --submit and take the script there",
            code="job-not-submitted",
        ) from error
    if done.returncode:
        raise LaunchError(
            f"sbatch refused the job: {done.stderr.strip()}", code="job-not-submitted"
        )
    return "\n".join(filter(None, (done.stderr.strip(), done.stdout.strip())))  # warnings first


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
    arguments: of ``dear-train run``, or a command.
    environment: folder of the Python environment, used unless DEARMPI_VENV names another.

    Raises ConfigError for an option that sbatch would read as something else, or refuses beside the
    files' own. Raises it too for a time limit that sbatch refuses, or that is over before a step.
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
        if is_own_command(self.arguments):
            text = re.sub(r" dear-train run \\\n.*$", ' "$@"\n', text, flags=re.DOTALL)
        own = f"DEARMPI_VENV=${{DEARMPI_VENV:-{shlex.quote(self.environment)}}}\n"
        own += f'set -- {shlex.join(self.arguments)} "$@"\n' if self.arguments else ""
        head, set_up, rest = text.partition(_AFTER_OPTIONS)
        before, found, after = rest.partition(_BEFORE_ARGUMENTS)
        assert set_up and found, f"{_FILES[self.launcher]} lacks a line to write something beside"
        return head + lines + set_up + before + found + own + after


def _written(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"
