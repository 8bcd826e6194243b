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


def tracked_files() -> set[str]:
    """The repository's, and not what an editor or a merge has left among them."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "ls-files", "-z", PACKAGE]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = {name for name in listed.stdout.split("\0") if name}
    if not names:
        pytest.skip(f"no repository to compare with {listed.stderr}")
    return {name for name in names if os.path.lexists(ROOT / name)}


def test_a_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Data too, which an editable installation has whatever setup.cfg says."""
    missing = tracked_files() - set(wheel.namelist())
    assert not missing, f"{sorted(missing)}; name them in setup.cfg"


def test_a_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    (about,) = {name.split("/")[0] for name in wheel.namelist()} - {PACKAGE}
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    command = wheel.read(f"{about}/entry_points.txt").decode()
    assert "dear-train = dearmpi.cli.main:main" in command
