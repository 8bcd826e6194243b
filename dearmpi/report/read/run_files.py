"""Run files: what the files of one run hold, as far as they can be read; rows of its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from dearmpi.errors import ConfigError, DataError
from dearmpi.plan.data.fields import regular_file
from dearmpi.plan.data.plan import Plan, read_plan
from dearmpi.report.read.pace import Pace, SlowRanks
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
    def num_cores(self) -> int:
        """The cores that rank 0 may run on; 0 where not known."""
        cores = self.environment.get("cores")
        return len(cores) if isinstance(cores, list) else 0

    @property
    def num_threads(self) -> int:
        """The threads that torch computes with on rank 0; 0 where not known."""
        count = self.environment.get("torch_threads")
        return count if type(count) is int and count > 0 else 0

    @property
    def units(self) -> Units:
        """What the console calls throughput and loss."""
        return _read_units(self.environment.get("units"))

    @property
    def num_ranks(self) -> int | None:
        """How many ranks trained; None where not known."""
        size = self.environment.get("world_size")
        return size if isinstance(size, int) else len(self.recording.spans) or None


@dataclass(frozen=True, slots=True)
class Units:
    """rate: of what throughput counts ``per_sample``. loss_scale: the factor of what ``loss``
    names.
    """

    rate: str = "samples"
    per_sample: float = 1.0
    loss: str = "loss"
    loss_scale: float = 1.0


def _read_units(values: object) -> Units:
    """The units that env.json holds; samples and loss where they are missing or are none."""
    if not isinstance(values, dict):
        return Units()
    rate, loss = values.get("rate"), values.get("loss")
    factors = [_number(values.get(name), name) for name in ("per_sample", "loss_scale")]
    if not (isinstance(rate, str) and isinstance(loss, str) and all(factors)):
        return Units()
    return Units(rate, factors[0] or 1.0, loss, factors[1] or 1.0)


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
                    "least, such as --trace 20:22, since the first one lacks the all-gathers "
                    "before it."
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
        values = parse(regular_file(path).read_text(encoding="utf-8"))
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


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """What was measured up to one step; None where it was not. Units as in metrics.csv.

    rank_step_s, rank_wait_s, rank_data_s: of every rank; empty where not known.
    """

    step: int
    elapsed_s: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    exposed_s: float | None = None
    communication_s: float | None = None
    sent_mb: float | None = None
    owed_share: float | None = None
    fallbacks: float | None = None
    rank_step_s: tuple[float, ...] = ()
    rank_wait_s: tuple[float, ...] = ()
    rank_data_s: tuple[float, ...] = ()


_LISTS = ("rank_step_s", "rank_wait_s", "rank_data_s")
_SUMMARIZED = ("step_s", "wait_s", "data_s")
_MOST_RANKS = 1_000_000  # what tells of more is no row
_MOST = 1e300  # what is greater, or not a number, cannot be drawn
_NUMBERS = tuple(name for name in HistoryRow.__slots__[1:] if not name.startswith("rank_"))


@dataclass(frozen=True, slots=True)
class History:
    """Rows in order of steps. notes: what could not be read, in words."""

    rows: tuple[HistoryRow, ...] = ()
    notes: tuple[str, ...] = ()

    def column(
        self, value: Callable[[HistoryRow], float | None]
    ) -> tuple[tuple[float, float], ...]:
        """(step, value) of the rows that have it."""
        found = ((float(row.step), value(row)) for row in self.rows)
        return tuple((step, number) for step, number in found if number is not None)

    def typical(self, value: Callable[[HistoryRow], float | None]) -> float | None:
        """The median over the rows of the ranks that trained last, as far as rows tell of ranks.
        Without their first, which pays for starting, if there are more.
        """
        rows = (row for row in self.rows if len(row.rank_step_s) in (0, self._num_ranks()))
        numbers = [number for row in rows if (number := value(row)) is not None]
        return median(numbers[1:] or numbers) if numbers else None

    def typical_ranks(self) -> tuple[tuple[float, float, float], ...]:
        """Of each rank the medians of step, wait and data; without their first row as well."""
        rows = self._rank_rows()
        return tuple(
            (
                median(row.rank_step_s[rank] for row in rows),
                median(row.rank_wait_s[rank] for row in rows),
                median(row.rank_data_s[rank] for row in rows),
            )
            for rank in range(self._num_ranks())
        )

    def between_s(self) -> float:
        """What was done between steps, in seconds per step, without the last row: a run that has
        reached its end saves and evaluates there whatever its intervals.
        """
        pace = Pace()
        for row in self.rows[:-1]:
            if len(row.rank_step_s) in (0, self._num_ranks()):
                pace.add(row.step, row.elapsed_s, row.step_s)
        return pace.between_s

    def slow_ranks(self) -> SlowRanks:
        """For how much of the run the others waited for which ranks."""
        rows = self._rank_rows()
        before = [row.step for row in self.rows if rows and row.step < rows[0].step]
        slow_ranks = SlowRanks(before[-1] if before else 0)
        for row in rows:
            times = zip(row.rank_step_s, row.rank_wait_s, strict=True)
            busy_s = [max(0.0, step_s - wait_s) for step_s, wait_s in times]
            slow_ranks.add(row.step, busy_s, row.rank_wait_s)
        return slow_ranks

    def _rank_rows(self) -> list[HistoryRow]:
        """The rows of the ranks that trained last, without their first if there are more."""
        rows = [row for row in self.rows if row.rank_step_s]
        rows = [row for row in rows if len(row.rank_step_s) == self._num_ranks()]
        return rows[1:] or rows

    def _num_ranks(self) -> int:
        """Of the last row: a run may go on with another number of ranks."""
        return next((len(row.rank_step_s) for row in reversed(self.rows) if row.rank_step_s), 0)


def read_history(path: Path) -> History:
    """Read ``path``. A run that has measured nothing yet has no rows; lines that are no rows, such
    as the last half line of a writer that was killed, are left out and noted.

    Raises DataError where the file is there but cannot be read.
    """
    try:
        text = regular_file(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return History(notes=(f"There are no metrics: {path.name} is missing.",))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", code="unreadable-file") from error
    lines = text.splitlines()
    rows = [_parse(line) for line in lines]
    good = {row.step: row for row in rows if row is not None}
    notes = []
    if len(lines) > sum(row is not None for row in rows):
        bad = [number for number, row in enumerate(rows, 1) if row is None]
        notes.append(
            f"{len(bad)} of {len(lines)} lines of {path.name} {'is' if len(bad) == 1 else 'are'} "
            f"broken and left out; the first is line {bad[0]}."
        )
    if not good:
        notes.append(f"{path.name} holds no row yet.")
    return History(tuple(good[step] for step in sorted(good)), tuple(notes))


def _parse(line: str) -> HistoryRow | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return None
    fields: dict[str, Any] = {name: _number(values.get(name), name) for name in _NUMBERS}
    steps_s, waits_s, data_s = (_number_list(values.get(name), name) for name in _LISTS)
    if not steps_s:
        steps_s, waits_s, data_s = _of_summary(values.get("rank_times"))
    if len(steps_s) == len(waits_s):
        has_data = len(data_s) == len(steps_s)  # earlier versions lack it
        fields |= dict(
            zip(
                _LISTS,
                (steps_s, waits_s, data_s if has_data else (0.0,) * len(steps_s)),
                strict=True,
            )
        )
    return HistoryRow(values["step"], **fields)


def _of_summary(summary: Any) -> tuple[tuple[float, ...], ...]:
    """Step, wait and data of every rank, of which it holds only the busiest by number: the others
    are as the median. Nothing where it is no summary.
    """
    try:
        count = summary["num_ranks"]
        typical = _number_list([summary[name]["median"] for name in _SUMMARIZED], "rank_s")
        named = {int(r): _number_list(times, "rank_s") for r, times in summary["busiest"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return (), (), ()
    rows_are_whole = {len(times) for times in (typical, *named.values())} == {len(_SUMMARIZED)}
    if type(count) is not int or not rows_are_whole or not 0 < count <= _MOST_RANKS:
        return (), (), ()
    columns = zip(*(named.get(rank, typical) for rank in range(count)), strict=True)
    return tuple(columns)


def _number(value: Any, name: str) -> float | None:
    """``value`` if it is a number that ``name`` can have; times and rates are not negative."""
    if type(value) not in (int, float) or not abs(value) < _MOST:
        return None
    return None if value < 0 and name.endswith("_s") else float(value)


def _number_list(values: Any, name: str) -> tuple[float, ...]:
    numbers = [_number(value, name) for value in values] if isinstance(values, list) else []
    found = tuple(number for number in numbers if number is not None)
    return found if len(found) == len(numbers) else ()
