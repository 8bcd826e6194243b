"""Figures: what a run took, from its metrics and its recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from dearmpi.report.analyse.exposure import Exposure, measure_exposure, shared_wait
from dearmpi.report.read.pace import Stragglers, find_stragglers, name_ranks
from dearmpi.report.read.recording import Recording, spans_by_window
from dearmpi.report.read.run_files import History
from dearmpi.span import Track

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
