"""Figures: what a run took, from its metrics and its recording; and which bucket's communication a
rank waited for, and which was hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from dearmpi.report.read.pace import Stragglers, find_stragglers, name_ranks
from dearmpi.report.read.recording import (
    Interval,
    Recording,
    Window,
    intersect,
    spans_by_window,
    total,
    union,
)
from dearmpi.report.read.run_files import History
from dearmpi.span import Span, Track

_NETWORK = (Track.REDUCE_SCATTER, Track.ALL_GATHER)


@dataclass(frozen=True, slots=True)
class BucketTime:
    """A bucket's reduce-scatter and all-gather, in seconds per iteration.

    network_s: they were in flight. exposed_s: of it, the main thread waited. Where several
    operations were in flight, each bears an equal part, so that buckets add up to the whole.
    """

    bucket: int
    network_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.network_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class Exposure:
    """What one rank waited for, in seconds per iteration.

    communication_s: something was in flight.
    first_s: for the first bucket at the boundary between two iterations, when no other bucket is
        left to reduce. idle_s: while nothing was in flight, such as for an update.
    """

    buckets: tuple[BucketTime, ...]
    communication_s: float
    first_s: float
    idle_s: float

    @property
    def waited_s(self) -> float:
        return sum(bucket.exposed_s for bucket in self.buckets) + self.idle_s


def measure_exposure(spans: Sequence[Span], windows: Sequence[Window]) -> Exposure:
    """The exposure of the rank that recorded ``spans``: means over ``windows`` (at least one)."""
    network: dict[int, float] = {}
    exposed: dict[int, float] = {}
    communication_s = first_s = idle_s = 0.0
    for window, within in zip(windows, spans_by_window(spans, windows), strict=True):
        operations = [span for span in within if span.track in _NETWORK]
        for length_s, active in _pieces((window.start_s, window.stop_s), operations):
            _share_out(length_s, active, network)
            communication_s += length_s if active else 0.0
        for wait in _waits(within, window):
            for length_s, active in _pieces(wait, operations):
                _share_out(length_s, active, exposed)
                idle_s += 0.0 if active else length_s
                first_s += length_s if _only_first(active) else 0.0
    count = len(windows)
    return Exposure(
        tuple(
            BucketTime(bucket, seconds / count, exposed.get(bucket, 0.0) / count)
            for bucket, seconds in sorted(network.items())
        ),
        communication_s / count,
        first_s / count,
        idle_s / count,
    )


def shared_wait(recording: Recording) -> float:
    """The share of the least waiting rank's waits in which all other ranks waited as well, 0 to 1.

    Then the network is what they wait for; else a rank that still computes. 1 where nothing tells.
    """
    windows = [recording.windows(rank) for rank in recording.spans]
    if not windows or not all(windows):
        return 1.0
    start_s, stop_s = max(w[0].start_s for w in windows), min(w[-1].stop_s for w in windows)
    whole = Window(0, start_s, stop_s)
    waits = [_waits(spans, whole) for spans in recording.spans.values()]
    least_s = min(map(total, waits))
    shared = waits[0]
    for others in waits[1:]:
        shared = intersect(shared, others)
    return total(shared) / least_s if least_s > 0 else 1.0


def _waits(spans: Sequence[Span], window: Window) -> list[Interval]:
    clipped = (window.clip(span) for span in spans if span.track is Track.WAIT)
    return union(interval for interval in clipped if interval is not None)


def _pieces(whole: Interval, spans: Sequence[Span]) -> Iterator[tuple[float, list[Span]]]:
    """Parts of ``whole`` during which the same spans were active: length, spans."""
    start, stop = whole
    edges = {edge for span in spans for edge in (span.start_s, span.stop_s) if start < edge < stop}
    coming = sorted(spans, key=lambda span: span.start_s, reverse=True)
    active: list[Span] = []
    for low, high in pairwise(sorted({start, stop} | edges)):
        while coming and coming[-1].start_s <= low:
            active.append(coming.pop())
        active = [span for span in active if span.stop_s > low]
        yield high - low, active


def _share_out(seconds: float, active: Sequence[Span], by_bucket: dict[int, float]) -> None:
    for span in active:
        bucket = _bucket(span)
        by_bucket[bucket] = by_bucket.get(bucket, 0.0) + seconds / len(active)


def _only_first(active: Sequence[Span]) -> bool:
    reduced = {_bucket(span) for span in active if span.track is Track.REDUCE_SCATTER}
    return any(_bucket(span) == 0 for span in active) and reduced <= {0}


def _bucket(span: Span) -> int:
    assert span.bucket is not None, f"{span.name} is no bucket's"
    return span.bucket


_STEADY_SHARE = 0.75  # of a run; in less of it a rank may be late because others need its cores


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank took, in seconds per step; host is empty where not known.

    wait_s: its main thread waited for communication. data_s: it loaded data.
    """

    rank: int
    host: str
    step_s: float
    wait_s: float
    data_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """What is neither: computation, and whatever slows it down."""
        return max(0.0, self.step_s - self.wait_s - self.data_s)

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step took, in seconds.

    ranks: at least rank 0's. communication_s: a collective was in flight, exposed_s: its main
    thread waited for one, on rank 0.
    first_s: the rank that waits least waited for the first bucket, see ``Exposure``.
    shared_wait: see ``exposure.shared_wait``.
    slow_shares: the share of the run in which the others waited for a rank; 1 where not known.
    traced: whether spans show the first bucket by itself.
    between_s: what was done between two steps, such as to save, by mean.
    planned: whether the run followed a plan, which has weighed schedules and buckets.
    num_cores: that rank 0 may run on. num_threads: that torch computes with on it. 0: not known.
    """

    step_s: float
    communication_s: float
    exposed_s: float
    ranks: tuple[RankFigures, ...]
    first_s: float
    schedule: str
    traced: bool
    shared_wait: float = 1.0
    slow_shares: Mapping[int, float] = field(default_factory=dict)
    between_s: float = 0.0
    planned: bool = False
    num_cores: int = 0
    num_threads: int = 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to run on the same host, so that no network is between."""
        hosts = {times.host for times in self.ranks}
        return len(self.ranks) > 1 and len(hosts) == 1 and hosts != {""}

    @property
    def slowest(self) -> RankFigures:
        return max(self.ranks, key=lambda times: times.compute_s)

    @property
    def stragglers(self) -> Stragglers | None:
        """The slowest ranks, if the others wait for them, and not for each rank in turn."""
        busy_s, wait_s = zip(*((one.compute_s, one.wait_s) for one in self.ranks), strict=True)
        found = find_stragglers(busy_s, wait_s, step_s=self.step_s)
        if found is None:
            return None
        return found.only(p for p in found.places if self._slow_share(p) >= _STEADY_SHARE)

    def _slow_share(self, place: int) -> float:
        return self.slow_shares.get(self.ranks[place].rank, 1.0)

    def name(self, stragglers: Stragglers) -> str:
        """Their ranks and hosts, at the beginning of a sentence."""
        ranks = (self.ranks[place] for place in stragglers.places)
        named = name_ranks({times.rank: times.host for times in ranks})
        return named[0].upper() + named[1:]

    @property
    def least_waiting(self) -> RankFigures:
        """The rank that waits least: the others wait for that rank as well as for the network."""
        return min(self.ranks, key=lambda times: times.wait_s)

    @property
    def network_s(self) -> float:
        """What the network alone costs: the wait of the rank that waits least, while all wait."""
        return self.least_waiting.wait_s * self.shared_wait

    @property
    def data_s(self) -> float:
        """What loading data costs: the longest of all ranks."""
        return self.slowest_loader.data_s

    @property
    def slowest_loader(self) -> RankFigures:
        return max(self.ranks, key=lambda times: times.data_s)

    @property
    def hidden_share(self) -> float | None:
        """The share of rank 0's communication that computation covered; None without any."""
        if self.communication_s <= 0:
            return None
        return max(0.0, 1.0 - self.exposed_s / self.communication_s)


def measure(
    history: History,
    recording: Recording,
    *,
    hosts: tuple[str, ...],
    schedule: str,
    planned: bool = False,
    num_cores: int = 0,
    num_threads: int = 0,
) -> Figures | None:
    """The figures of a run; None where no step was measured.

    Times are those of the metrics, which cover the whole run, and of the recording what metrics do
    not tell. hosts: of each rank, as far as known. Others: as in ``Figures``.
    """
    traced = _traced_ranks(recording)
    ranks = _metric_ranks(history, hosts) or tuple(traced.values())
    if not ranks:
        return None
    if len(ranks) < len(traced) and not history.typical_ranks():
        ranks = tuple(traced.values())  # the metrics tell of rank 0 alone
    if not history.typical_ranks():  # rows that tell nothing of the time for data
        ranks = tuple(replace(one, data_s=traced.get(one.rank, one).data_s) for one in ranks)
    step_s = max(times.step_s for times in ranks)  # of the rows that tell of waits too
    if step_s <= 0:
        return None
    communication_s = history.typical(lambda row: row.communication_s)
    exposed_s = history.typical(lambda row: row.exposed_s)
    slow_ranks = history.slow_ranks()
    return Figures(
        step_s=step_s,
        communication_s=_in_flight(recording) if communication_s is None else communication_s,
        exposed_s=ranks[0].wait_s if exposed_s is None else exposed_s,
        ranks=ranks,
        first_s=_first_bucket(recording, ranks),
        schedule=recording.schedule or schedule,
        traced=bool(traced),
        shared_wait=shared_wait(recording),
        slow_shares={one.rank: slow_ranks.share(one.rank) for one in ranks},
        between_s=history.between_s(),
        planned=planned,
        num_cores=num_cores,
        num_threads=num_threads,
    )


def _metric_ranks(history: History, hosts: tuple[str, ...]) -> tuple[RankFigures, ...]:
    times = history.typical_ranks()
    step_s = history.typical(lambda row: row.step_s)
    if not times and step_s is not None:
        times = ((step_s, history.typical(lambda row: row.exposed_s) or 0.0, 0.0),)
    names = dict(enumerate(hosts))
    return tuple(
        RankFigures(rank, names.get(rank, ""), *seconds) for rank, seconds in enumerate(times)
    )


def _traced_ranks(recording: Recording) -> dict[int, RankFigures]:
    """Medians over the recorded iterations of each rank."""
    found = {}
    for rank, spans in recording.spans.items():
        windows = recording.windows(rank)
        if not windows:
            continue
        sums = {track: [0.0] * len(windows) for track in (Track.WAIT, Track.DATA)}
        for place, within in enumerate(spans_by_window(spans, windows)):
            for span in within:
                clipped = windows[place].clip(span)
                if span.track in sums and clipped is not None:
                    sums[span.track][place] += clipped[1] - clipped[0]
        found[rank] = RankFigures(
            rank,
            recording.hosts.get(rank, ""),
            median(window.length_s for window in windows),
            median(sums[Track.WAIT]),
            median(sums[Track.DATA]),
        )
    return found


def exposure_of(recording: Recording, rank: int) -> Exposure | None:
    """The exposure of ``rank``; None where it recorded no iteration from end to end."""
    windows = recording.windows(rank) if rank in recording.spans else ()
    return measure_exposure(recording.spans[rank], windows) if windows else None


def _first_bucket(recording: Recording, ranks: tuple[RankFigures, ...]) -> float:
    exposure = exposure_of(recording, least_waiting_of(recording, ranks))
    return 0.0 if exposure is None else exposure.first_s


def least_waiting_of(recording: Recording, ranks: Sequence[RankFigures]) -> int:
    """The rank that waits least, of those that recorded an iteration if there are any."""
    recorded = [one for one in ranks if one.rank in recording.spans and recording.windows(one.rank)]
    return min(recorded or ranks, key=lambda times: times.wait_s).rank


def _in_flight(recording: Recording) -> float:
    exposure = exposure_of(recording, min(recording.spans, default=0))
    return 0.0 if exposure is None else exposure.communication_s
