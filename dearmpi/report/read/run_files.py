"""Run files: what the files of one run say, as far as they can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dearmpi.errors import ConfigError, DataError
from dearmpi.plan.data.plan import Plan, read_plan
from dearmpi.report.read.history import History, read_history
from dearmpi.report.read.recording import Recording, record
from dearmpi.report.read.trace import find_traces, read_traces


@dataclass(frozen=True, slots=True)
class RunRecord:
    """settings: as in config.yaml. environment: as in env.json; both empty where missing.

    plan: what was followed at last; None without --plan.
    notes: what is missing or could not be read, in sentences.
    """

    name: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    history: History
    recording: Recording
    plan: Plan | None
    notes: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank; empty where not known."""
        hosts = self.environment.get("hosts", ())
        return tuple(map(str, hosts)) if isinstance(hosts, list) else ()

    @property
    def num_ranks(self) -> int | None:
        """How many ranks trained; None where not known."""
        size = self.environment.get("world_size")
        return size if isinstance(size, int) else len(self.recording.spans) or None


def read_run(path: Path) -> RunRecord:
    """Read the run folder at ``path``, laid out as ``train/run/run_folder.py`` says.

    Nothing that is missing or broken is an error: it becomes a note.
    """
    notes: list[str] = []
    settings = _read(path / "config.yaml", yaml.safe_load, notes)
    environment = _read(path / "env.json", json.loads, notes)
    try:
        history = read_history(path / "metrics.jsonl")
    except DataError as error:
        history = History(notes=(_sentence(str(error)),))
    recording = Recording()
    if find_traces(path):
        try:
            recording = record(read_traces(path))
        except ConfigError as error:
            recording = Recording(notes=(f"The traces are left out: {error}",))
        else:
            size = environment.get("world_size", recording.world_size)
            if recording.world_size != size:
                recording = Recording()
                notes.append(
                    "The traces are left out: they are of an earlier part of the run, on another "
                    "number of ranks."
                )
            elif recording.typical() is None:
                notes.append(
                    "The trace holds no iteration from end to end on all ranks: record two at "
                    "least, such as --trace 20:22, since one begins where the backprop before it "
                    "ended."
                )
    else:
        notes.append("There is no trace: record one with --trace START:STOP to see an iteration.")
    notes += [*history.notes, *map(_sentence, recording.notes)]
    plan = _read_plan(path / "plan.json", notes)
    return RunRecord(
        path.resolve().name, settings, environment, history, recording, plan, tuple(notes)
    )


def _read_plan(path: Path, notes: list[str]) -> Plan | None:
    try:
        return read_plan(path) if path.exists() else None
    except ConfigError as error:
        notes.append(f"The plan is left out: {error}.")
        return None


def _read(path: Path, parse: Any, notes: list[str]) -> Mapping[str, Any]:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except (OSError, ValueError, yaml.YAMLError):
        notes.append(f"{path.name} cannot be read.")
    else:
        if isinstance(values, dict):
            return values
        notes.append(f"{path.name} cannot be read.")
    return {}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
