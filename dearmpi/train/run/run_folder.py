"""Run folder: the place of one run's settings, logs, metrics and checkpoints.

::

    runs/NAME/in-use-by           the process that has it, locked as long as that lives
              config.yaml         the settings in effect
              env.json            where and with what it ran
              metrics.csv .jsonl  one row per logged step
              logs/rank-00003.log
              plan.json           what is followed, if a plan is
              bucket_caps.csv     what was tried, with --plan bayes
              trace/              with --trace
              tensorboard/ wandb/ mlruns/ trackers.json    with --tracker
              checkpoints/step-00001000/
              latest              names the checkpoint to resume from
              best                names the best one, with --keep-best
              begun-from          the checkpoint of another run, with --resume PATH --name NAME
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dearmpi.errors import CheckpointError, ConfigError, DearError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train import disk
from dearmpi.train.disk import FolderLock, is_folder, is_there


class _Member:
    """The path of one file or folder in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Rank 0 creates it; the others open it afterwards.

    lock: the hold of the run's job on it, on rank 0 of that.
    """

    path: Path
    lock: FolderLock | None = None

    lock_file = _Member("in-use-by")
    config = _Member("config.yaml")
    environment = _Member("env.json")
    metrics_csv = _Member("metrics.csv")
    metrics_jsonl = _Member("metrics.jsonl")
    begun_from = _Member("begun-from")
    plan = _Member("plan.json")
    bucket_caps = _Member("bucket_caps.csv")
    logs = _Member("logs")
    trace = _Member("trace")
    checkpoints = _Member("checkpoints")
    latest = _Member("latest")

    @classmethod
    def create(cls, root: Path, name: str, *, resume: bool = False) -> RunFolder:
        """Create the run folder ``root/name``.

        resume: an existing run there is continued. Raises ConfigError for a name that is no folder
        name, and for a folder that cannot be created or is not free (``check_free``).
        """
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigError(
                f"run name {name!r} is no folder name; use letters, digits, - and _",
                code="malformed-value",
            )
        folder = cls(root / name)
        folder.check_free(resume=resume)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=resume)  # which one of two new runs can
            folder.logs.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(
                f"{folder.path} was made by another run that started just now; give each run "
                "its own --name",
                code="run-folder-in-use",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot create the run folder {folder.path}: {error.strerror}; choose a "
                "--run-folder that can be written",
                code="cannot-write",
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the existing run folder at ``path``; raises ConfigError when it is none, or may
        not be looked at.
        """
        folder = cls(path)
        if not is_folder(path, ConfigError):
            meant = Path("runs", path)
            hint = f"did you mean {meant}? " if is_folder(meant, ConfigError) else ""
            raise ConfigError(
                f"there is no folder {path}; {hint}give the folder of a run", code="file-missing"
            )
        # A copy may lack the checkpoints, which are large.
        has_metrics = is_there(folder.metrics_jsonl, ConfigError)
        if not (folder.holds_run or has_metrics or is_folder(folder.trace, ConfigError)):
            raise ConfigError(
                f"{path} is no run folder: it has neither {folder.checkpoints.name}/ nor "
                "metrics; give the folder of a run, such as runs/NAME",
                code="no-run",
            )
        return folder

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here. Raises ConfigError for an unreadable path."""
        return is_folder(self.checkpoints, ConfigError)

    def check_own(self) -> None:
        """Raise CheckpointError if the job that had the folder, by this rank, has it no more."""
        if self.lock is not None:
            self.lock.check()

    def log(self, rank: int) -> Path:
        """Return the path of the log of ``rank``."""
        return self.logs / f"rank-{rank:05d}.log"

    def write_config(self, text: str) -> None:
        """Replace config.yaml."""
        _write(self.config, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace env.json."""
        _write(self.environment, json.dumps(environment, indent=1) + "\n")

    def write_plan(self, text: str | None) -> None:
        """Replace plan.json; None removes it."""
        if text is not None:
            _write(self.plan, text)
            return
        try:
            self.plan.unlink(missing_ok=True)
        except OSError as error:
            raise DearError(
                f"cannot remove {self.plan}: {error.strerror}", code="cannot-write"
            ) from error

    def write_begun_from(self, checkpoint: Path) -> None:
        """Remember the checkpoint of another run that this one was begun from."""
        _write(self.begun_from, json.dumps(str(checkpoint)) + "\n")

    def read_begun_from(self) -> Path | None:
        """The checkpoint of another run that this one began from, or None. Raises CheckpointError
        for an unreadable file: the run would silently begin anew.
        """
        try:
            return Path(json.loads(regular_file(self.begun_from).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise CheckpointError(
                f"cannot read {self.begun_from}, which names the checkpoint that the run "
                f"started from: {reason}; restore it, or remove it if the run has its own "
                "checkpoints",
                code="unreadable-file",
            ) from error

    def check_free(self, *, resume: bool) -> None:
        """Raise ConfigError unless a run can begin here or, with ``resume``, go on."""
        try:
            used = any(self.path.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be used as a run folder: {error.strerror}; use another --name",
                code="unreadable-file",
            ) from error
        if not used or (resume and self.holds_run):
            return
        if resume:
            raise ConfigError(
                f"{self.path} holds files but no run to resume; use another --name", code="no-run"
            )
        raise ConfigError(
            f"{self.path} {self._describe_content()}; use another --name, or continue this run "
            "with --resume auto",
            code="run-folder-not-empty",
        )

    def _describe_content(self) -> str:
        if not self.holds_run:
            return "holds other files"
        try:
            reached = Path(regular_file(self.latest).read_text(encoding="utf-8").strip()).name
        except FileNotFoundError:
            return "holds a run without a checkpoint"
        except (OSError, ValueError):
            reached = ""
        if not reached.startswith("step-"):
            return f"holds a run, of which {self.latest} names no checkpoint"
        return f"holds a run that reached {reached}"


def _write(path: Path, text: str) -> None:
    try:
        disk.write_text(path, text)
    except OSError as error:
        raise disk.unwritable(path, error) from error


def free_name(root: Path, now: datetime.datetime) -> str:
    """Return a run name made of the time ``now`` that is not taken in ``root``.

    One rank chooses the name and sends it to the others.
    """
    base = now.strftime("%Y%m%d-%H%M%S")
    name, number = base, 1
    while os.path.exists(root / name):  # what may not be looked at is refused when it is made
        number += 1
        name = f"{base}-{number}"
    return name
