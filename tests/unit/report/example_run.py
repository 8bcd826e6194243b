"""A run folder as dear-train leaves it, with figures of our choice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from dearmpi.report.read.trace import trace_path
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter
from dearmpi.span import Span, Track


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """Iterations of DeAR, in seconds, laid one after the other.

    At the boundary every rank waits ``backlog_s`` for the reduce-scatters of other buckets, then
    ``first_s`` for the first bucket's. Then come feed-forward, with all-gathers behind it, data,
    and backprop, with reduce-scatters behind it. ``slow``: rank to how much longer it computes;
    the others wait for it.
    """

    num_ranks: int = 2
    num_buckets: int = 4
    num_iterations: int = 5
    forward_s: float = 0.3
    backward_s: float = 0.6
    data_s: float = 0.0
    backlog_s: float = 0.0
    first_s: float = 0.02
    slow: dict[int, float] = field(default_factory=dict)
    run_id: str = "one"

    def wait_s(self, rank: int) -> float:
        """What the main thread of ``rank`` waits in an iteration."""
        most = max(self.slow.values(), default=0.0)
        return self.backlog_s + self.first_s + most - self.slow.get(rank, 0.0)

    @property
    def step_s(self) -> float:
        """An iteration."""
        compute_s = self.forward_s + self.backward_s + self.data_s
        return compute_s + self.wait_s(0) + self.slow.get(0, 0.0)

    def spans(self, rank: int) -> list[Span]:
        """All spans of ``rank``."""
        now, found = 0.0, list[Span]()
        for iteration in range(1, self.num_iterations + 1):
            found += self._iteration(rank, iteration, now)
            now += self.step_s
        return found

    def _collective(
        self, track: Track, bucket: int, start_s: float, stop_s: float, iteration: int
    ) -> Span:
        name = ("RS" if track is Track.REDUCE_SCATTER else "AG") + str(bucket)
        size = 2**20 * (1 + bucket)
        return Span(track, name, start_s, stop_s, iteration, bucket, size, queued_s=start_s)

    def _iteration(self, rank: int, number: int, now: float) -> list[Span]:
        count = self.num_buckets
        found: list[Span] = []
        stop = now + self.wait_s(rank)
        found.append(Span(Track.WAIT, "bucket 0", now, stop, number))
        first = stop - self.first_s
        middle = first + self.first_s / 2
        if number > 1:
            found += [
                self._collective(Track.REDUCE_SCATTER, 1, now, first, number - 1),
                self._collective(Track.REDUCE_SCATTER, 0, first, middle, number - 1),
                self._collective(Track.ALL_GATHER, 0, middle, stop, number - 1),
            ]
        forward_s = self.forward_s + self.slow.get(rank, 0.0) / 2
        backward_s = self.backward_s + self.slow.get(rank, 0.0) / 2
        share = forward_s / count
        for bucket in range(count):
            start = stop + share * bucket
            found.append(Span(Track.COMPUTE, f"F layer{bucket}", start, start + share, number))
            if number > 1 and bucket:
                gather = start - share / 2
                found.append(
                    self._collective(Track.ALL_GATHER, bucket, gather, gather + share, number - 1)
                )
        stop += forward_s
        found.append(Span(Track.DATA, "data", stop, stop + self.data_s, number))
        stop += self.data_s
        share = backward_s / count
        for place, bucket in enumerate(reversed(range(count))):
            start = stop + share * place
            found.append(Span(Track.COMPUTE, f"B layer{bucket}", start, start + share, number))
            if bucket > 1:
                begin = start + share
                found.append(
                    self._collective(Track.REDUCE_SCATTER, bucket, begin, begin + share, number)
                )
        return found

    def write(self, path: Path, *, name: str = "example") -> Path:
        """Write the run folder ``path``/``name``."""
        folder = path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("task: bytes-lm\nschedule: dear\n")
        hosts = [f"n{rank}" for rank in range(self.num_ranks)]
        facts = {"world_size": self.num_ranks, "hosts": hosts, "command": ["dear-train", "run"]}
        (folder / "env.json").write_text(json.dumps(facts))
        (folder / "metrics.jsonl").write_text("".join(map(self._row, range(1, 21))))
        for rank in range(self.num_ranks):
            self.write_trace(folder, rank)
        return folder

    def write_trace(self, folder: Path, rank: int) -> None:
        """Write the trace of one rank."""
        writer = TraceWriter(trace_path(folder, rank))
        writer.begin(
            TraceHeader(
                run=folder.name,
                run_id=self.run_id,
                rank=rank,
                world_size=self.num_ranks,
                host=f"n{rank}",
                iterations=(1, 1 + self.num_iterations),
                schedule="dear",
                bucket_bytes=tuple(2**20 * (1 + bucket) for bucket in range(self.num_buckets)),
            )
        )
        for span in self.spans(rank):
            writer.add(span)
        writer.close()

    def _row(self, number: int) -> str:
        row = {
            "step": number * 10,
            "epoch": 0,
            "loss": 5.0 / number,
            "eval_loss": 5.5 / number if number % 5 == 0 else None,
            "learning_rate": 0.1,
            "samples_per_s": 64 / self.step_s,
            # The first row pays for starting.
            "step_s": self.step_s * (3 if number == 1 else 1),
            "exposed_s": self.wait_s(0),
            "communication_s": 0.8 * self.step_s,
            "rank_step_s": [self.step_s] * self.num_ranks,
            "rank_wait_s": [self.wait_s(rank) for rank in range(self.num_ranks)],
            "rank_data_s": [self.data_s] * self.num_ranks,
        }
        return json.dumps({key: value for key, value in row.items() if value is not None}) + "\n"
