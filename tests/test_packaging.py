"""What users install holds what the repository does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dearmpi"
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('.')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Made from what its build reads, and nothing else."""
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml says
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    # A link is not followed: a zip archive of the repository, unpacked by pip, has none.
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-c", BUILD]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_a_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Data too, which an editable installation has whatever setup.cfg says."""
    expected = {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / PACKAGE, followlinks=True)
        for name in names
        if Path(folder).name != "__pycache__"
    }
    found = {name for name in wheel.namelist() if name.startswith(f"{PACKAGE}/")}
    assert found == expected


def test_a_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    (about,) = {name.split("/")[0] for name in wheel.namelist()} - {PACKAGE}
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    command = wheel.read(f"{about}/entry_points.txt").decode()
    assert "dear-train = dearmpi.cli.main:main" in command
