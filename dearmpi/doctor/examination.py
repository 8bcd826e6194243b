"""Examination: all checks in order, those that others depend on first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dearmpi.bench.collective_times import Overlap
from dearmpi.comm.process import Library
from dearmpi.comm.world import World
from dearmpi.doctor import launcher as launch
from dearmpi.doctor.finding import Finding, RankFacts, cuda_devices, exit_code, gather_facts, ok
from dearmpi.doctor.folder import FolderTrial, judge_folder, try_folder
from dearmpi.doctor.host_network import (
    MeasuredNetwork,
    gather_algorithms,
    judge_network,
    judge_overlap,
    judge_tcp,
    judge_transport,
    measure_hiding,
    measure_network,
)
from dearmpi.doctor.machine import (
    is_crowded,
    judge_cores,
    judge_devices,
    judge_extras,
    judge_software,
    judge_workers,
)
from dearmpi.train.settings.settings import RunSettings
from dearmpi.tune.device_probe import ProbeVerdict, probe, share_verdicts


@dataclass(slots=True)
class Examination:
    """What was found so far, for people through ``tell`` and for bug reports as JSON.

    verdicts: of operations on device memory. overlap: of a reduce-scatter of ``overlap_bytes``.
    error: what ended the examination before its end.
    """

    tell: Callable[[Finding], None]
    findings: list[Finding] = field(default_factory=list)
    library: Library | None = None
    ranks: Sequence[RankFacts] = ()
    verdicts: Sequence[ProbeVerdict] = ()
    network: MeasuredNetwork | None = None
    overlap_bytes: int = 0
    overlap: Overlap | None = None
    folder: FolderTrial | None = None
    error: str = ""

    def note(self, finding: Finding) -> None:
        """Keep a finding, and tell it."""
        self.findings.append(finding)
        self.tell(finding)

    def as_plain(self) -> dict[str, Any]:
        """Mappings, lists, texts, numbers and paths; no variable that may be secret."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "exit_code": None if self.error else exit_code(self.findings),
            "error": self.error or None,
            "mpi": _plain(self.library),
            "launcher": launch.name_launcher(os.environ) or None,
            "ranks": [asdict(rank) for rank in self.ranks],
            "device_memory": [asdict(verdict) for verdict in self.verdicts],
            "network": _plain(self.network),
            "overlap_bytes": self.overlap_bytes,
            "overlap": _plain(self.overlap),
            "run_folder": _plain(self.folder),
        }


def _plain(
    found: Library | MeasuredNetwork | Overlap | FolderTrial | None,
) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def probe_devices() -> tuple[ProbeVerdict, ...]:
    """What MPI does on this host's device memory, if there is any; before MPI is initialised."""
    return probe() if cuda_devices() else ()


def examine(
    examination: Examination,
    world: World,
    settings: RunSettings,
    *,
    joined: bool,
    verdicts: Sequence[ProbeVerdict],
) -> None:
    """Run all checks (collective). All ranks get the same findings.

    settings: those that ``dear-train run`` would begin with. joined: whether the ranks that were
    launched are this world. verdicts: of rank 0's probe.
    """
    note = examination.note
    library, reason = launch.find_library()
    examination.library = library
    note(launch.judge_library(library, reason))
    note(launch.judge_launch(world.hosts, library, joined=joined))
    if library is not None:
        note(launch.judge_thread_level(library))
    ranks = examination.ranks = gather_facts(world, threads_asked=settings.threads)
    note(judge_software(ranks))
    note(judge_extras())
    note(judge_cores(ranks))
    examination.verdicts = share_verdicts(world, verdicts)
    note(judge_devices(ranks, examination.verdicts))
    infiniband = ranks[0].infiniband
    note(judge_transport(os.environ, infiniband, crowded=is_crowded(ranks)))
    _examine_network(examination, world)
    note(judge_workers(ranks[0].start_method, infiniband, os.environ))
    examination.folder = try_folder(world, Path(settings.run_folder))
    note(judge_folder(examination.folder))


def _examine_network(examination: Examination, world: World) -> None:
    if world.size == 1:
        examination.note(
            ok("network", "one rank has none; to measure it: mpirun -n 2 dear-train doctor")
        )
        return
    channel = world.open_channel("doctor", window=1)
    examination.network = network = measure_network(world, channel)
    examination.note(judge_network(network))
    if (finding := judge_tcp(gather_algorithms(world))) is not None:
        examination.note(finding)
    num_bytes, overlap = measure_hiding(world, channel, network)
    examination.overlap_bytes, examination.overlap = num_bytes, overlap
    examination.note(judge_overlap(num_bytes, overlap))
    channel.close()
