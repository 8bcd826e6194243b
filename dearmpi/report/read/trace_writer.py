"""Trace writer: one rank's spans as a Chrome trace, which Perfetto and chrome://tracing open.

The file is a JSON array of events (Trace Event Format, array form), complete after every write:
each write begins where the closing bracket stands and ends with a new one. A process that is killed
between writes leaves a whole file; one killed within a write leaves a torn end, which the format
allows and ``report/read/trace.py`` reads.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from dearmpi.span import Span, Track

MOST_SPANS = 200_000  # of one rank: about 30 MB, more than a viewer handles well
SLOT_STRIDE = 10  # the second of two overlapping spans goes to track + 10, and so on
_END = b"\n]\n"
_COMPUTE = Track.COMPUTE
_SLICE, _NAP_S = 16, 2e-4  # spans that are put into words at once, and the rest after it


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What is said about a trace at its start.

    run, run_id: the run's name, and what tells its trace from that of any other run.
    iterations: the first, and the one before which recording stops.
    bucket_bytes: by bucket, in feed-forward order.
    origin_s: what this rank's ``time.perf_counter`` showed where the trace's time is 0.
    offset_s, uncertainty_s: to be added to this rank's times to get those of rank 0, give or take.
    """

    run: str
    run_id: str
    rank: int
    world_size: int
    host: str
    iterations: tuple[int, int]
    schedule: str
    bucket_bytes: tuple[int, ...]
    origin_s: float = 0.0
    offset_s: float = 0.0
    uncertainty_s: float = 0.0


class TraceWriter:
    """Records spans in memory, and has them written at each ``flush``. A ``Recorder``.

    A thread of its own writes, since the iterations that are recorded go on meanwhile. It puts few
    spans into words at a time, and rests in between: one thread at a time runs Python, and a layer
    that comes to its end must not wait for that. A failure to write ends the trace with a warning:
    no training is lost for its picture.
    """

    def __init__(self, path: Path, *, most_spans: int = MOST_SPANS) -> None:
        """Make the file at ``path``, empty; raises OSError where that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._file.write(b"[" + _END)
        self._offset = 1
        self._header: TraceHeader | None = None
        self._spans: deque[Span] = deque()
        self._wanted = SimpleQueue[bool]()
        self._writing = Lock()
        self._thread: Thread | None = None
        self._left = most_spans
        self._most = most_spans
        self._busy_until: dict[int, float] = {}

    def begin(self, header: TraceHeader) -> None:
        """Write what the trace is of."""
        self._header = header
        self._write(_to_lines(describe(header)))
        self._thread = Thread(target=self._write_when_wanted, name="trace writer", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        """Keep ``span`` until the next ``flush``; of too many, the rest is dropped."""
        if self._left > 0:
            self._spans.append(span)
        self._left -= 1

    def flush(self) -> None:
        """Have what was added written; returns once what was added before the last time is."""
        if self._thread is not None and self._thread.is_alive():
            self._writing.acquire()
            self._wanted.put(True)

    def close(self) -> None:
        """Write the rest, and where spans were dropped how many. Safe to call twice."""
        if self._thread is not None:
            self._wanted.put(False)
            self._thread.join()
            self._thread = None
            self._write_spans()
            if self._left < 0:
                self._write(_to_lines([self._note_of_cap()]))
        self._file.close()

    def _write_when_wanted(self) -> None:
        while self._wanted.get():
            try:
                self._write_spans(nap_s=_NAP_S)
            finally:
                self._writing.release()

    def _write_spans(self, *, nap_s: float = 0.0) -> None:
        # Others may add meanwhile; that is left for the next time.
        left = len(self._spans)
        lines: list[str] = []
        while left:
            count = min(left, _SLICE)
            self._put_into_words(count, lines)
            left -= count
            if nap_s and left:
                time.sleep(nap_s)
        self._write(lines)

    def _put_into_words(self, count: int, lines: list[str]) -> None:
        """Append the events of the next ``count`` spans to ``lines``."""
        assert self._header is not None
        rank, origin_s, take = self._header.rank, self._header.origin_s, self._spans.popleft
        for _ in range(count):
            span = take()
            track, name, *_ = span
            # Layers lie within layers or apart, which viewers show on one track.
            tid = _COMPUTE if track is _COMPUTE else self._find_track(span, lines)
            lines.append(_span_line(span, _head(rank, tid, name), origin_s))

    def _find_track(self, span: Span, lines: list[str]) -> int:
        """One on which ``span`` overlaps no other, since viewers would drop it; named if new."""
        assert self._header is not None
        tid = int(span.track)
        while span.start_s < self._busy_until.get(tid, span.start_s):
            tid += SLOT_STRIDE
        if tid >= SLOT_STRIDE and tid not in self._busy_until:
            label = f"{span.track.label} ({tid // SLOT_STRIDE + 1})"
            lines += _to_lines(_name_track(self._header.rank, tid, label))
        self._busy_until[tid] = span.stop_s
        return tid

    def _note_of_cap(self) -> dict[str, Any]:
        assert self._header is not None
        text = f"trace full: {-self._left} more than the {self._most} spans that are kept"
        return {"ph": "M", "pid": self._header.rank, "name": "note", "args": {"text": text}}

    def _write(self, lines: list[str]) -> None:
        if not lines or self._file.closed:
            return
        text = ",".join("\n" + line for line in lines)
        data = (("," if self._offset > 1 else "") + text).encode()
        try:
            _write_at(self._file.fileno(), data + _END, self._offset)
        except OSError as error:
            self._file.close()
            logging.getLogger("dearmpi").warning(
                "cannot write the trace %s: %s; it ends here", self._path, error.strerror
            )
        self._offset += len(data)


def describe(header: TraceHeader) -> list[dict[str, Any]]:
    """The events that say what the trace is of, and what its tracks are called."""
    rank = header.rank
    offset_us, within_us = header.offset_s * 1e6, header.uncertainty_s * 1e6
    label = f"clock {offset_us:+.1f} us to rank 0, within {within_us:.1f} us"
    facts: dict[str, dict[str, Any]] = {
        "process_name": {"name": f"rank {rank} on {header.host}"},
        "process_sort_index": {"sort_index": rank},
        "process_labels": {"labels": label},
        "run": {
            "name": header.run,
            "id": header.run_id,
            "rank": rank,
            "world_size": header.world_size,
            "host": header.host,
            "iterations": list(header.iterations),
        },
        "clock": {
            "offset_us": round(offset_us, 3),
            "uncertainty_us": round(within_us, 3),
            "reference": "rank 0",
        },
        "plan": {"schedule": header.schedule, "bucket_bytes": list(header.bucket_bytes)},
    }
    events = [{"ph": "M", "pid": rank, "name": name, "args": args} for name, args in facts.items()]
    for track in Track:
        events += _name_track(rank, int(track), track.label)
    return events


def _name_track(rank: int, tid: int, name: str) -> list[dict[str, Any]]:
    sort_index = tid % SLOT_STRIDE * 100 + tid // SLOT_STRIDE
    facts = {"thread_name": {"name": name}, "thread_sort_index": {"sort_index": sort_index}}
    return [
        {"ph": "M", "pid": rank, "tid": tid, "name": key, "args": args}
        for key, args in facts.items()
    ]


def _to_lines(events: Iterable[Mapping[str, Any]]) -> list[str]:
    return [json.dumps(event, separators=(",", ":")) for event in events]


def _span_line(span: Span, head: str, origin_s: float) -> str:
    """The event of a span; put together by hand, since json takes longer.

    Both ends are rounded to nanoseconds, not the length, so that spans that touch still do.
    """
    _, _, start_s, stop_s, iteration, bucket, nbytes, queued_s, progress_s = span
    start_ns, stop_ns = round((start_s - origin_s) * 1e9), round((stop_s - origin_s) * 1e9)
    times = f'{head},"ts":{start_ns / 1e3:.3f},"dur":{(stop_ns - start_ns) / 1e3:.3f}'
    if bucket is None:
        return f'{times},"args":{{"iteration":{iteration}}}}}'
    args = f'"iteration":{iteration},"bucket":{bucket},"bytes":{nbytes}'
    if queued_s is not None:
        args += f',"queued_us":{(start_s - queued_s) * 1e6:.1f}'
    if progress_s is not None:
        args += f',"first_progress_us":{(progress_s - start_s) * 1e6:.1f}'
    return f'{times},"args":{{{args}}}}}'


@cache  # names are few, and come in every iteration
def _head(rank: int, tid: int, name: str) -> str:
    """The part of an event that is the same in every iteration."""
    quoted, label = json.dumps(name), Track(tid % SLOT_STRIDE).label
    return f'{{"ph":"X","pid":{rank},"tid":{tid},"name":{quoted},"cat":"{label}"'


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data``: the system may take it in parts."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
