"""Examination: all checks in order, those that others depend on first; and the check of the
folder: whether runs can be kept in it, and whether all ranks see the same one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dearmpi.bench.collective_times import Overlap
from dearmpi.comm.process import Library
from dearmpi.comm.world import World
from dearmpi.doctor import launcher as launch
from dearmpi.doctor.finding import (
    Finding,
    RankFacts,
    cuda_devices,
    exit_code,
    fail,
    gather_facts,
    ok,
    warn,
)
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
from dearmpi.train import disk
from dearmpi.train.settings.settings import RunSettings
from dearmpi.tune.device_probe import ProbeVerdict, probe, share_verdicts

_SAMPLE_BYTES = 16 * 1024 * 1024
_SLOW_BYTES_S = 20e6
_LITTLE_BYTES = 2e9
_BEFORE, _AFTER = "before", "after"
_SCRATCH = ".dear-doctor-"
_LEFT_AFTER_S = 3600.0  # a trial takes seconds, so what is this old was left by one that was killed


@dataclass(frozen=True, slots=True)
class FolderTrial:
    """What rank 0 found in ``folder``, the nearest that exists, and what the others read there.

    error: why it could not be used; the rest then counts for nothing. bytes_s: written through to
    the disk. read: each rank's two readings of a file, before and after rank 0 replaced it.
    """

    folder: Path
    hosts: Sequence[str]
    error: str = ""
    bytes_s: float = 0.0
    free_bytes: int = 0
    read: Sequence[tuple[str, str]] = ()


def try_folder(world: World, root: Path) -> FolderTrial:
    """Write, rename and read in the folder of runs, and leave nothing behind (collective).

    What killed trials left there is removed, and where they were while there was no ``root`` yet.
    """
    folder, error, bytes_s, free_bytes = root.absolute(), "", 0.0, 0
    scratch: Path | None = None
    try:
        if world.is_root:
            try:
                folder = nearest(folder)
                remove_left(folder, root.absolute().parent)
                scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
                bytes_s = _write_speed(scratch / "sample")
                free_bytes = shutil.disk_usage(scratch).free
                disk.write_text(scratch / "replaced", _BEFORE)
            except OSError as problem:
                error = problem.strerror or str(problem)
        place = Path(world.broadcast_text(str(scratch or "")))
        before = read(place / "replaced")
        world.barrier()
        if scratch is not None and not error:
            disk.write_text(scratch / "replaced", _AFTER)
        world.barrier()
        readings = zip(
            world.all_gather_text(before),
            world.all_gather_text(read(place / "replaced")),
            strict=True,
        )
        return FolderTrial(folder, world.hosts, error, bytes_s, free_bytes, tuple(readings))
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def judge_folder(trial: FolderTrial) -> Finding:
    """Whether checkpoints are safe there, and found again by every rank."""
    name = "run folder"
    if trial.error:
        return fail(
            name,
            f"cannot write to {trial.folder}: {trial.error}",
            cure="choose a place that can be written to, with --run-folder",
        )
    for rank, (before, after) in enumerate(trial.read):
        where = f"rank {rank} on {trial.hosts[rank]}"
        if before != _BEFORE:
            return fail(
                name,
                f"{where} does not see what rank 0 on {trial.hosts[0]} wrote to {trial.folder}",
                cure="choose a folder on a file system that all hosts share, with --run-folder",
            )
        if after != _AFTER:
            return warn(
                name,
                f"{where} still sees the old file after rank 0 replaced it in {trial.folder}",
                cure="mount the file system with a shorter attribute cache (NFS: actimeo=1), or "
                "choose another",
            )
    said = (
        f"{trial.folder}: {trial.bytes_s / 1e6:.0f} MB/s written through to the disk, files "
        f"replaced in one piece, {trial.free_bytes / 1e9:.0f} GB free"
    )
    if trial.bytes_s < _SLOW_BYTES_S:
        return warn(name, said, cure="choose a faster disk with --run-folder, or save less often")
    if trial.free_bytes < _LITTLE_BYTES:
        return warn(name, said, cure="make room, or choose another place with --run-folder")
    return ok(name, said)


def remove_left(*folders: Path) -> None:
    """Remove what trials that were killed have left in ``folders``, as far as that may be done."""
    oldest_s = time.time() - _LEFT_AFTER_S
    for path in {path for folder in folders for path in folder.glob(f"{_SCRATCH}*")}:
        with suppress(OSError):
            if path.stat().st_mtime < oldest_s:
                shutil.rmtree(path, ignore_errors=True)


def nearest(path: Path) -> Path:
    """``path``, or the nearest of its parents that is there: nothing is made for a look."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def read(path: Path) -> str:
    """The text of a file, opened anew; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _write_speed(path: Path) -> float:
    """Bytes per second, of a sample that compresses badly, until it is on the disk."""
    sample = os.urandom(_SAMPLE_BYTES)
    start = time.perf_counter()
    path.write_bytes(sample)
    disk.sync_file(path)
    return _SAMPLE_BYTES / (time.perf_counter() - start)


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
    mpirun: launch.Mpirun | None = None,
) -> None:
    """Run all checks (collective). All ranks get the same findings.

    settings: those that ``dear-train run`` would begin with. joined: whether the ranks that were
    launched are this world. verdicts: of rank 0's probe. mpirun: what would start several ranks.
    """
    note = examination.note
    library, reason = launch.find_library()
    examination.library = library
    note(launch.judge_library(library, reason))
    note(launch.judge_launch(world.hosts, library, joined=joined, mpirun=mpirun))
    if library is not None and library.thread_level:
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
