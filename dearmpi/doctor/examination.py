"""Examination: all checks in order, those that others depend on first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dearmpi.comm.world import World
from dearmpi.doctor import launch
from dearmpi.doctor.cores import check_cores, is_crowded
from dearmpi.doctor.device import check_devices
from dearmpi.doctor.facts import RankFacts, cuda_devices, gather_facts
from dearmpi.doctor.finding import Finding, ok
from dearmpi.doctor.folder import check_folder, try_folder
from dearmpi.doctor.network import (
    Network,
    check_network,
    check_overlap,
    measure_hiding,
    measure_network,
)
from dearmpi.doctor.software import check_extras, check_software, check_workers
from dearmpi.doctor.transport import check_transport
from dearmpi.tune.device_probe import Verdict, probe


@dataclass(slots=True)
class Examination:
    """What was found so far, for people through ``tell`` and for bug reports as JSON."""

    tell: Callable[[Finding], None]
    findings: list[Finding] = field(default_factory=list)
    ranks: Sequence[RankFacts] = ()
    network: Network | None = None

    def note(self, finding: Finding) -> None:
        """Keep a finding, and tell it."""
        self.findings.append(finding)
        self.tell(finding)

    def as_plain(self) -> dict[str, Any]:
        """Mappings, lists, texts and numbers; no variable of the environment that may be secret."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": [asdict(rank) for rank in self.ranks],
            "network": None if self.network is None else asdict(self.network),
        }


def probe_devices() -> tuple[Verdict, ...]:
    """What MPI does on this host's device memory, if there is any; before MPI is initialised."""
    return probe() if cuda_devices() else ()


def examine(
    world: World,
    *,
    joined: bool,
    verdicts: Sequence[Verdict],
    folder: Path,
    tell: Callable[[Finding], None],
) -> Examination:
    """Run all checks (collective). All ranks get the same findings.

    joined: whether the ranks that were launched are this world. verdicts: of rank 0's probe.
    """
    examination = Examination(tell)
    note = examination.note
    library, reason = launch.find_library()
    note(launch.check_library(library, reason))
    note(launch.check_launch(world.hosts, library, joined=joined))
    if library is not None:
        note(launch.check_thread_level(library))
    ranks = examination.ranks = gather_facts(world)
    note(check_software(ranks))
    note(check_extras())
    note(check_cores(ranks))
    note(check_devices(ranks, _share(world, verdicts)))
    infiniband = ranks[0].infiniband
    note(check_transport(os.environ, infiniband, crowded=is_crowded(ranks)))
    examination.network = _examine_network(world, note)
    note(check_workers(ranks[0].start_method, infiniband, os.environ))
    note(check_folder(try_folder(world, folder)))
    return examination


def _examine_network(world: World, note: Callable[[Finding], None]) -> Network | None:
    if world.size == 1:
        note(ok("network", "one rank has none; to measure it: mpirun -n 2 dear-train doctor"))
        return None
    channel = world.open_channel("doctor", window=1)
    network = measure_network(world, channel)
    note(check_network(network))
    note(check_overlap(*measure_hiding(world, channel, network)))
    channel.close()
    return network


def _share(world: World, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Rank 0's on every rank (collective)."""
    text = world.broadcast_text(json.dumps([asdict(verdict) for verdict in verdicts]))
    return [Verdict(**plain) for plain in json.loads(text)]
