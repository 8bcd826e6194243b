"""Traces of a run: read them, whole or torn, and check that they belong together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file

FOLDER = "trace"
_NAME = re.compile(r"rank-(\d+)\.json")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's trace; times in microseconds.

    run_id: the same in all traces of one run. offset_us: makes this rank's times those of rank 0,
    within uncertainty_us.
    events: all of them, metadata included, as they stand in the file.
    torn: the file ends in the middle, since its rank was killed.
    """

    path: Path
    rank: int
    world_size: int
    run: str
    run_id: str
    offset_us: float
    uncertainty_us: float
    events: tuple[Event, ...]
    torn: bool

    def aligned(self) -> Iterator[Event]:
        """The events, at the times of rank 0's clock."""
        for event in self.events:
            if "ts" in event:
                yield {**event, "ts": round(event["ts"] + self.offset_us, 3)}
            else:
                yield event


@dataclass(frozen=True, slots=True)
class Traces:
    """All traces of one run, by rank, and what is wrong with them, in sentences."""

    traces: tuple[Trace, ...]
    notes: tuple[str, ...]


def trace_path(run_folder: Path, rank: int) -> Path:
    """Where the trace of ``rank`` is."""
    return run_folder / FOLDER / f"rank-{rank:05d}.json"


def merged_path(run_folder: Path) -> Path:
    """Where those of all ranks are, once merged."""
    return run_folder / FOLDER / "merged.json"


def find_traces(run_folder: Path) -> dict[int, Path]:
    """The trace files of the run at ``run_folder``, by rank."""
    found = {
        int(match[1]): path
        for path in (run_folder / FOLDER).glob("rank-*.json")
        if (match := _NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def read_traces(run_folder: Path) -> Traces:
    """All traces of the run at ``run_folder``.

    A rank whose trace is missing, empty or torn is named in the notes. Raises ConfigError where
    there is no trace at all, for a file that is no trace, and for one of another run.
    """
    if not os.path.isdir(run_folder):  # Path.is_dir fails where it may not look
        raise ConfigError(
            f"{run_folder} is no folder; name the folder of a run", code="file-missing"
        )
    traces: list[Trace] = []
    notes: list[str] = []
    found = find_traces(run_folder)
    for rank, path in found.items():
        trace = read_trace(path)
        if trace is None:
            notes.append(f"rank {rank}: {path.name} holds nothing; its rank had not begun")
            continue
        _check_run(trace, traces)
        traces.append(trace)
        if trace.torn:
            notes.append(f"rank {rank}: {path.name} ends in the middle; read as far as it goes")
        notes += [f"rank {rank}: {text}" for text in _own_notes(trace)]
    if not traces:
        begun = "traces, but nothing is in them" if found else "no traces"
        raise ConfigError(
            f"{run_folder} has {begun}; record some with dear-train run --trace START:STOP",
            code="no-traces",
        )
    run, name = traces[0].run, run_folder.resolve().name
    if run != name:
        notes.append(f"the traces are of run {run}; unless {name} was called so, remove them")
    missing = [str(rank) for rank in range(traces[0].world_size) if rank not in found]
    if missing:
        notes.append(f"no trace of {'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}")
    return Traces(tuple(traces), tuple(notes))


def _own_notes(trace: Trace) -> list[str]:
    """What the rank has said of its trace, such as how many spans it left out."""
    noted = (e for e in trace.events if e.get("ph") == "M" and e.get("name") == "note")
    return [str(event.get("args", {}).get("text", "")) for event in noted]


def read_trace(path: Path) -> Trace | None:
    """The trace in the file at ``path``; None if its rank had not begun to write.

    Raises ConfigError for a file that cannot be read or is no trace.
    """
    try:
        text = regular_file(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error.strerror}", code="unreadable-file"
        ) from error
    events, torn = parse_events(text, path)
    facts = {event["name"]: event.get("args", {}) for event in events if event.get("ph") == "M"}
    if not events:
        return None
    try:
        run, clock = facts["run"], facts["clock"]
        return Trace(
            path=path,
            rank=int(run["rank"]),
            world_size=int(run["world_size"]),
            run=str(run["name"]),
            run_id=str(run["id"]),
            offset_us=float(clock["offset_us"]),
            uncertainty_us=float(clock["uncertainty_us"]),
            events=tuple(events),
            torn=torn,
        )
    except (KeyError, TypeError, ValueError) as error:
        if torn:
            return None
        raise ConfigError(
            f"{path} is no trace of dear-train: it does not say its run", code="not-a-trace"
        ) from error


def parse_events(text: str, path: Path) -> tuple[list[Event], bool]:
    """The events of a trace, and whether its end is missing. Raises ConfigError for other text."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list) and all(_is_event(event) for event in whole):
        return whole, False
    if whole is not None or not "[".startswith(text[:1]):
        raise ConfigError(
            f"{path} is no trace: it does not hold an array of events", code="not-a-trace"
        )
    events = []
    for line in text[1:].split("\n"):  # one event to a line
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if _is_event(event):
            events.append(event)
    return events, True


def _is_event(value: object) -> bool:
    if not isinstance(value, dict) or "ph" not in value:
        return False
    return isinstance(value.get("name"), str) and isinstance(value.get("ts", 0), int | float)


def _check_run(trace: Trace, others: list[Trace]) -> None:
    for other in others[:1]:
        if trace.run_id != other.run_id:
            raise ConfigError(
                f"{trace.path} is of run {trace.run} ({trace.run_id}), {other.path.name} of run "
                f"{other.run} ({other.run_id}); remove the one that does not belong here",
                code="traces-of-two-runs",
            )


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
        raise ConfigError(
            f"{path} is a trace that is to be merged; see --out", code="output-is-input"
        )
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
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; see --out", code="cannot-write"
        ) from error
    within_us = sorted((trace.uncertainty_us for trace in traces.traces), reverse=True)
    return Merged(path, len(traces.traces), num_events, sum(within_us[:2]), traces.notes)


def _lines(traces: Traces) -> Iterator[str]:
    for trace in traces.traces:
        for event in trace.aligned():
            yield json.dumps(event, separators=(",", ":"))
