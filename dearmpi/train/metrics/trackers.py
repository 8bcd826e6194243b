"""Trackers: where the rows of metrics go besides the run folder's own files.

A tracker of another kind is a class with the methods of ``Tracker``, a line in ``TRACKERS``, and a
name in the setting ``tracker``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dearmpi.config import known_names
from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train import disk

PROJECT = "dearmpi"  # in a tracker's service, where the environment names no other


class Tracker(Protocol):
    """Takes rows, on rank 0. What it raises does not end a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values measured at ``step``, by column."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run whose rows a tracker takes.

    folder: of the run; ``trackers.json`` in it keeps the names that services gave the run.
    settings: plain data. resume_step: the step from which the run goes on; None for a new one.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None

    def stored_id(self, tracker: str) -> str | None:
        """The name that ``tracker`` knows this run by; None before ``store_id``."""
        found = self._ids().get(tracker)
        return None if found is None else str(found)

    def store_id(self, tracker: str, name: str) -> None:
        """Keep the name for when the run is resumed."""
        disk.write_text(self._file, json.dumps(self._ids() | {tracker: name}) + "\n")

    @property
    def _file(self) -> Path:
        return self.folder / "trackers.json"

    def _ids(self) -> dict[str, Any]:
        try:
            ids = json.loads(regular_file(self._file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return ids if isinstance(ids, dict) else {}


class TensorBoard:
    """Writes scalars to ``tensorboard/`` in the run folder.

    Events after the step of a resumed run, from before it was resumed, are hidden.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resume_step is None else run.resume_step + 1
        folder = str(run.folder / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """Logs to Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE`` and its other variables count.

    Its files lie in ``wandb/`` in the run folder. A resumed run goes on under its id there.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        name = run.stored_id("wandb") or uuid.uuid4().hex[:12]
        self._run: Any = wandb.init(
            id=name,
            name=run.folder.name,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
        )
        # The service takes steps in rising order only, and a resumed run repeats some.
        self._run.define_metric("*", step_metric="step")
        run.store_id("wandb", name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MLflow:
    """Logs to MLflow at ``MLFLOW_TRACKING_URI``, else into ``mlruns/`` in the run folder.

    ``MLFLOW_EXPERIMENT_NAME`` names the experiment. A resumed run goes on under its id.
    """

    def __init__(self, run: TrackedRun) -> None:
        folder = (run.folder / "mlruns").absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = folder.as_uri()
            # Newer versions refuse a store of files otherwise.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = run.stored_id("mlflow")
        if found is None:
            found = self._begin(run)
            run.store_id("mlflow", found)
        else:
            self._client.update_run(found, status="RUNNING")
        self._id = found

    def _begin(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        made = self._client.create_run(experiment_id, run_name=run.folder.name)
        for key, value in run.settings.items():
            self._client.log_param(made.info.run_id, key, value)
        return str(made.info.run_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        millis = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(re.sub(r"[^\w./ :-]", "_", name), value, millis, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class _Kind(NamedTuple):
    """How a tracker is made, the module it needs, and the extra that installs this."""

    make: Callable[[TrackedRun], Tracker]
    module: str
    extra: str


# "csv" is the run folder's own metrics.csv, which every run has.
CSV = "csv"
TRACKERS: Mapping[str, _Kind] = {
    "tensorboard": _Kind(TensorBoard, "tensorboard", "tensorboard"),
    "wandb": _Kind(WandB, "wandb", "wandb"),
    "mlflow": _Kind(MLflow, "mlflow", "mlflow"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not known, or whose package is not installed."""
    for name in names:
        if name == CSV:
            continue
        if name not in TRACKERS:
            raise ConfigError(
                f"there is no tracker {name!r}{known_names(name, [CSV, *TRACKERS])}",
                code="unknown-choice",
            )
        if importlib.util.find_spec(TRACKERS[name].module) is None:
            raise ConfigError(
                f"the tracker {name} is not installed; run: "
                f"pip install 'dearmpi[{TRACKERS[name].extra}]', or leave it out",
                code="library-missing",
            )


class Trackers:
    """The trackers ``names`` of ``run``, on rank 0. One that fails is warned of, and the run goes
    on.

    Raises ConfigError where one cannot be made, as without its package.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        check_trackers(names)
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            if name != CSV:
                self._trackers[name] = _make(name, run)

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Hand on each measured value but the step itself."""
        known = {n: v for n, v in values.items() if n != "step" and v is not None}
        for name, tracker in self._trackers.items():
            with _warning(name, f"of step {step}"):
                tracker.write(step, known)

    def close(self) -> None:
        """Let each send what is left."""
        for name, tracker in self._trackers.items():
            with _warning(name, "at the end"):
                tracker.close()


@contextmanager
def _warning(name: str, when: str) -> Iterator[None]:
    """Turn what a tracker raises into a warning."""
    try:
        yield
    except Exception as error:
        warnings.warn(
            f"the tracker {name} may lack its last rows, {when}: {error}; metrics.csv has all",
            stacklevel=1,
        )


def _make(name: str, run: TrackedRun) -> Tracker:
    try:
        return TRACKERS[name].make(run)
    except Exception as error:
        raise ConfigError(
            f"the tracker {name} cannot be used: {type(error).__name__}: {error}; mend that, or "
            "leave it out",
            code="library-broken",
        ) from error
