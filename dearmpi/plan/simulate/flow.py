"""Flow: when each bucket of one iteration is reduced, updated and gathered, on one wire.

The engine's rules (``engine/iteration/pipeline.py``, ``comm/progress/progress.py``):

- A bucket passes the stages of its ``Conduct`` in order.
- Reduce-scatters are posted in the schedule's order, each once its bucket is ready; all-gathers in
  the schedule's order, each once the stage before it and the reduce-scatter that it is tied to are
  complete. At most ``window`` of each kind are in flight, on one ``Wire``.
- Updates run one after the other, beside the wire: of those that are possible, the one whose gather
  comes first. So does the work of codecs, which stands where an operation has arrived, encoding
  included.

No bucket is under way when backprop begins, since the feed-forward before it has waited for all
of them. So every iteration begins in the same state, and one pass is the steady state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dearmpi.plan.data.schedule import Conduct, Launch, Stage, Wait


@dataclass(frozen=True, slots=True)
class Load:
    """What one bucket brings. ready_s: end of backprop for all of its parameters.

    reduce_codec_s, gather_codec_s: in which the progress thread encodes and decodes.
    """

    ready_s: float
    reduce: WireDemand
    update_s: float
    gather: WireDemand
    reduce_codec_s: float = 0.0
    gather_codec_s: float = 0.0


@dataclass(slots=True)
class BucketTimes:
    """When one bucket was on its way: start and stop of each part, in seconds."""

    reduce: tuple[float, float] = (math.inf, math.inf)
    update: tuple[float, float] = (math.inf, math.inf)
    gather: tuple[float, float] = (math.inf, math.inf)

    @property
    def current_s(self) -> float:
        """When its parameters may be read."""
        return max(self.update[1], self.gather[1])


_STOP_S: dict[Stage, Callable[[BucketTimes], float]] = {
    Stage.REDUCE: lambda times: times.reduce[1],
    Stage.UPDATE: lambda times: times.update[1],
    Stage.GATHER: lambda times: times.gather[1],
}

_IDLE = ((0.0, 0.0),) * 3  # a bucket that takes no part holds up nothing


class Flow:
    """Carries the buckets of ``loads`` through one iteration; a load of None takes no part.

    step_s: end of backprop. Where ``conduct`` is eager, options are known from the start, instead
    of at the step.
    """

    def __init__(self, loads: Sequence[Load | None], conduct: Conduct, *, step_s: float) -> None:
        schedule = conduct.schedule
        self._loads, self._schedule, self._window = loads, schedule, conduct.window
        self._step_s, self._options_s = step_s, 0.0 if conduct.eager else step_s
        self._stop_before_update_s = _STOP_S[conduct.stage_before(Stage.UPDATE)]
        self._stop_before_gather_s = _STOP_S[conduct.stage_before(Stage.GATHER)]
        # Else a further backprop might still add to what is gathered.
        self._gathers_wait = not conduct.waits_in_step
        late = step_s if schedule.launch is Launch.BACKPROP_END else 0.0
        self._launches: deque[tuple[float, int]] = deque()
        for bucket in schedule.reduce_scatters:
            if (load := loads[bucket]) is not None:
                late = max(late, load.ready_s)
                self._launches.append((late, bucket))
        self._gathers = deque(g for g in schedule.all_gathers if loads[g.bucket] is not None)
        self._places = {one.bucket: place for place, one in enumerate(schedule.all_gathers)}
        self._wire = Wire()
        self._num_reducing = 0
        self._jobs: deque[tuple[Stage, int]] = deque()  # of the progress thread
        self._now = 0.0
        self.bucket_times = [
            BucketTimes() if load is not None else BucketTimes(*_IDLE) for load in loads
        ]
        self.num_events = 0

    def run(self) -> list[BucketTimes]:
        """When each bucket was on its way."""
        working = math.inf
        while True:
            self._start()
            if working == math.inf and self._jobs:
                working = self._begin_job()
            options = self._options_s if self._now < self._options_s else math.inf
            now, landed = self._wire.advance(min(working, self._next_launch(), options))
            if now == math.inf:
                return self.bucket_times
            self.num_events += 1
            self._move_to(now, landed)
            if working <= now:
                self._end_job()
                working = math.inf

    @property
    def forward_start_s(self) -> float:
        """When the feed-forward may begin, after ``run``: at the step, or once all is current."""
        if self._schedule.wait is not Wait.STEP:
            return self._step_s
        return max([self._step_s, *(times.current_s for times in self.bucket_times)])

    def _move_to(self, now: float, landed: Sequence[Flight]) -> None:
        """Let time pass, and land what has arrived."""
        before, self._now = self._now, now
        for flight in landed:
            self._land(flight)
        if before < self._options_s <= now:
            for gather in self._schedule.all_gathers:
                self._try_update(gather.bucket)

    def _land(self, flight: Flight) -> None:
        self._num_reducing -= flight.reduces
        load = self._loads[flight.bucket]
        assert load is not None
        stage = Stage.REDUCE if flight.reduces else Stage.GATHER
        if load.reduce_codec_s if flight.reduces else load.gather_codec_s:
            self._note(stage, flight.bucket, (flight.start_s, math.inf))
            self._jobs.append((stage, flight.bucket))
        else:
            self._note(stage, flight.bucket, (flight.start_s, self._now))

    def _note(self, stage: Stage, bucket: int, interval: tuple[float, float]) -> None:
        times = self.bucket_times[bucket]
        if stage is Stage.REDUCE:
            times.reduce = interval
        else:
            times.gather = interval
        if self._now >= self._options_s:
            self._try_update(bucket)

    def _try_update(self, bucket: int) -> None:
        times = self.bucket_times[bucket]
        before_s = self._stop_before_update_s(times)
        job = (Stage.UPDATE, bucket)
        if before_s <= self._now and times.update[1] == math.inf and job not in self._jobs:
            self._jobs.append(job)

    def _begin_job(self) -> float:
        if self._jobs[0][0] is Stage.UPDATE:
            first = min(
                (job for job in self._jobs if job[0] is Stage.UPDATE),
                key=lambda job: self._places[job[1]],
            )
            self._jobs.remove(first)
            self._jobs.appendleft(first)
        stage, bucket = self._jobs[0]
        load = self._loads[bucket]
        assert load is not None
        if stage is Stage.UPDATE:
            stop = self._now + load.update_s
            self.bucket_times[bucket].update = (self._now, stop)
            return stop
        return self._now + (load.reduce_codec_s if stage is Stage.REDUCE else load.gather_codec_s)

    def _end_job(self) -> None:
        stage, bucket = self._jobs.popleft()
        times = self.bucket_times[bucket]
        if stage is Stage.REDUCE:
            self._note(stage, bucket, (times.reduce[0], self._now))
        elif stage is Stage.GATHER:
            self._note(stage, bucket, (times.gather[0], self._now))

    def _start(self) -> None:
        """Post what the window, the order and the buckets' states admit."""
        while self._next_launch() <= self._now:
            self._post(self._launches.popleft()[1], reduces=True)
        while (
            self._gathers
            and len(self._wire) - self._num_reducing < self._window
            and self._may_gather()
        ):
            self._post(self._gathers.popleft().bucket, reduces=False)

    def _may_gather(self) -> bool:
        gather = self._gathers[0]
        times = self.bucket_times[gather.bucket]
        if self._gathers_wait and self._now < self._options_s:
            return False
        before_s = self._stop_before_gather_s(times)
        return max(before_s, self.bucket_times[gather.after].reduce[1]) <= self._now

    def _post(self, bucket: int, *, reduces: bool) -> None:
        load = self._loads[bucket]
        assert load is not None
        transfer = load.reduce if reduces else load.gather
        self._num_reducing += reduces
        flight = Flight(bucket, transfer, reduces=reduces, now=self._now)
        self._wire.post(flight, self._now)

    def _next_launch(self) -> float:
        if not self._launches or self._num_reducing >= self._window:
            return math.inf
        return self._launches[0][0]


MOST_ROUNDS = 4  # simulated; with more, messages are smaller and the sum of waits is the same


@dataclass(frozen=True, slots=True)
class WireDemand:
    """One collective: seconds if alone, for how long it needs the whole wire, and its rounds."""

    alone_s: float
    wire_s: float
    num_rounds: int = 1


class Flight:
    """A transfer under way, with the ``bucket`` that it carries."""

    __slots__ = (
        "bucket",
        "left",
        "message_left_s",
        "message_s",
        "pause_s",
        "reduces",
        "start_s",
        "until_s",
    )

    def __init__(self, bucket: int, transfer: WireDemand, *, reduces: bool, now: float) -> None:
        self.bucket, self.reduces, self.start_s = bucket, reduces, now
        self.left = transfer.num_rounds
        self.message_s = self.message_left_s = transfer.wire_s / self.left
        self.pause_s = max(0.0, transfer.alone_s - transfer.wire_s) / self.left
        self.until_s = now  # end of the message on the wire, or of the pause after it


class Wire:
    """What is in flight: one message on the wire, others in line, and transfers in a pause.

    A collective goes in rounds: in each, a rank sends a message to its neighbour and waits for the
    one that comes from the other side. Messages over one link arrive in order, so each stands in
    line behind those of its kind that are on their way. A small reduce-scatter beside a large one
    waits for the large one's message in every round, unless that pauses. (The engine hands over
    2 MiB at most, so beside larger buckets it waits less than here.)

    Reduce-scatters pass all-gathers, as in ``comm/algorithms/algorithm.py``: what is left of a
    gather's message goes on after them.
    """

    def __init__(self) -> None:
        self._line: deque[Flight] = deque()
        self._pausing: list[Flight] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._pausing)

    def post(self, flight: Flight, now: float) -> None:
        """Put the next message of ``flight`` in line."""
        if flight.message_s == 0:  # what takes no time on the wire waits for nothing before it
            flight.until_s = now + flight.pause_s
            self._pausing.append(flight)
            return
        line, place = self._line, len(self._line)
        while flight.reduces and place and not line[place - 1].reduces:
            place -= 1
        flight.message_left_s = flight.message_s
        if place == 0:
            if line:
                line[0].message_left_s = line[0].until_s - now
            flight.until_s = now + flight.message_s
        line.insert(place, flight)

    def advance(self, limit_s: float) -> tuple[float, list[Flight]]:
        """Let time pass until something is complete, to ``limit_s`` at most: until when, and what.

        Infinite, and nothing, if nothing is in flight and there is no limit.
        """
        line, pausing = self._line, self._pausing
        while True:
            resumed_s = math.inf
            for flight in pausing:
                if flight.until_s < resumed_s:
                    resumed_s = flight.until_s
            now = resumed_s
            if line and line[0].until_s < now:
                now = line[0].until_s
            if now > limit_s or now == math.inf:
                return limit_s, []
            if line and line[0].until_s <= now:
                sent = line.popleft()
                sent.until_s = now + sent.pause_s
                pausing.append(sent)
                if sent.until_s < resumed_s:
                    resumed_s = sent.until_s
                if line:
                    line[0].until_s = now + line[0].message_left_s
            if resumed_s <= now and (landed := self._end_pauses(now)):
                return now, landed

    def _end_pauses(self, now: float) -> list[Flight]:
        """Send the next messages; what had its last is complete."""
        landed = []
        for flight in [one for one in self._pausing if one.until_s <= now]:
            self._pausing.remove(flight)
            flight.left -= 1
            if flight.left:
                self.post(flight, now)
            else:
                landed.append(flight)
        return landed
