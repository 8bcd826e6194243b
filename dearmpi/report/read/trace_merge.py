"""Trace merge: one file for all ranks, at the times of rank 0's clock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dearmpi.errors import ConfigError
from dearmpi.report.read.trace import Traces, find_traces, merged_path, read_traces


@dataclass(frozen=True, slots=True)
class Merged:
    """What came out. uncertainty_us: how far the clocks of two ranks may be apart.

    notes: what is missing, in sentences.
    """

    path: Path
    num_ranks: int
    num_events: int
    uncertainty_us: float
    notes: tuple[str, ...]


def merge(run_folder: Path, out: Path | None = None) -> Merged:
    """Write the traces of the run at ``run_folder`` to ``out``, by default ``trace/merged.json``.

    Raises ConfigError as ``read_traces`` does, for an ``out`` that is one of the traces, and where
    it cannot be written.
    """
    traces = read_traces(run_folder)
    path = out or merged_path(run_folder)
    if path.resolve() in (trace.resolve() for trace in find_traces(run_folder).values()):
        raise ConfigError(f"{path} is a trace that is to be merged; see --out")
    temporary = path.with_name(f".{path.name}.writing")
    num_events = 0
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for num_events, line in enumerate(_lines(traces), 1):
                file.write(("[\n" if num_events == 1 else ",\n") + line)
            file.write("\n]\n")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # what cannot be written can likely not be removed
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}; see --out") from error
    within_us = sorted((trace.uncertainty_us for trace in traces.traces), reverse=True)
    return Merged(path, len(traces.traces), num_events, sum(within_us[:2]), traces.notes)


def _lines(traces: Traces) -> Iterator[str]:
    for trace in traces.traces:
        for event in trace.aligned():
            yield json.dumps(event, separators=(",", ":"))
