"""A cluster for all tests here; they are skipped, with the reason, where it cannot be made."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    environment["DEARMPI_VENV"] = sys.prefix
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
    try:
        with Cluster(folder, environment=environment) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
