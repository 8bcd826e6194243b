"""The GPU's script on machines without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forks import forked
from tests.gpu.machine import rows_of
from tests.gpu.run import PARTS, run_part

ROOT = Path(__file__).resolve().parent.parent.parent


def run(folder: Path, *arguments: str) -> str:
    command = forked([sys.executable, ROOT / "tests/gpu/run.py", *arguments])
    environment = os.environ | {"OUT": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_says_why_it_does_nothing(tmp_path: Path) -> None:
    reason = "built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    assert reason in run(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "what"),
    [
        ("copies", "staging, each way"),
        pytest.param("parity", "parity, staged", marks=pytest.mark.slow),
    ],
)
def test_a_part_runs_on_the_host(tmp_path: Path, module: str, what: str) -> None:
    """Of the quick ones, each on as few ranks as it takes; all of them run now and then."""
    part = next(part for part in PARTS if part.module == module)
    python = forked([sys.executable])
    output, code = run_part(part, folder=tmp_path, limit_s=part.limit_s, is_dry=True, python=python)
    assert code == 0, output
    assert what in {row[0] for row in rows_of(output)}


@pytest.mark.slow
def test_all_its_parts_run_on_the_host(tmp_path: Path) -> None:
    said = run(tmp_path, "--dry")
    for what in ("parity, staged", "iteration, resnet50", "staging, each way", "profile, resnet50"):
        assert what in said
    assert "FAILED" not in said
