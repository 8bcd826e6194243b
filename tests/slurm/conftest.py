"""A cluster for all tests here; they are skipped, with the reason, where it cannot be made."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import forked
from tests.job import clean_environment, remove_segments
from tests.slurm.cluster import Cluster, missing_programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: Debian's packages slurm-wlm and munge")
    environment = {
        name: value
        for name, value in clean_environment().items()
        if not name.startswith(("SLURM_", "SBATCH_", "DEARMPI_", "DEAR_TRAIN_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["OMP_NUM_THREADS"] = "1"
    # What UCX tells other ranks through pmi2 arrives damaged at times (docs/how-to/slurm.md).
    environment["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    environment["FI_PROVIDER"] = "tcp"
    # A test run that is ended from outside must still end the cluster.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # MPICH names its shared memory by the job's number, which begins at 1 in every cluster.
    remove_segments(least_age_s=5.0)
    folder = Path(tempfile.mkdtemp(prefix="dear-slurm-"))
    folder.chmod(0o711)
    environment["DEARMPI_VENV"] = str(_make_environment(folder / "venv"))
    try:
        with Cluster(folder, environment=environment) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _make_environment(folder: Path) -> Path:
    """This environment, but that ranks of ``dear-train run`` start as forks."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for path in Path(sys.executable).parent.iterdir():
        (programs / path.name).symlink_to(path)
    fork = shlex.join(map(str, forked([sys.executable, "-m", "dearmpi.cli.main"])))
    script = programs / "dear-train"
    real = shlex.quote(str(script.readlink()))
    script.unlink()
    script.write_text(f'#!/bin/sh\n[ "$1" != run ] || exec {fork} "$@"\nexec {real} "$@"\n')
    script.chmod(0o755)
    return folder
