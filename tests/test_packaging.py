"""What users install, and what they unpack, hold what the repository does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from setup import description
from tests.job import clean_environment

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dearmpi"
# Files of a repository's host, which do not travel with its sources.
OF_THE_HOST = (".git", ".pre-commit")


def listed_files(*folders: str) -> set[str]:
    """The repository's, and not what an editor or a merge has left among them."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "ls-files", "-z", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = {name for name in listed.stdout.split("\0") if name}
    if not names:
        pytest.skip(f"no repository to compare with {listed.stderr}")
    return {name for name in names if os.path.lexists(ROOT / name)}


def build(folder: Path, what: str) -> Path:
    """Build ``sdist`` or ``wheel`` in ``folder`` and return its path."""
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml says
    command = [sys.executable, "-c", f"from setuptools.build_meta import *; build_{what}('out')"]
    (folder / "out").mkdir(exist_ok=True)
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (folder / "out").glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[what])
    return path


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the repository's files, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    for name in listed_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # A link is not followed: a zip archive of the repository, unpacked by pip, has none.
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    with tarfile.open(build(folder, "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (root,) = (folder / "unpacked").iterdir()
    return root


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> zipfile.ZipFile:
    """Made from the source distribution and nothing else."""
    return zipfile.ZipFile(build(unpacked, "wheel"))


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_a_source_distribution_holds_the_repository(unpacked: Path) -> None:
    names = {name for name in listed_files() if not name.startswith(OF_THE_HOST)}
    missing = {name for name in names if not (unpacked / name).exists()}
    assert not missing, f"{sorted(missing)}; name them in MANIFEST.in"


def test_tests_run_from_a_source_distribution(unpacked: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "tests/unit/plan/data", "tests/unit/test_selection.py"],
        cwd=unpacked,
        env=clean_environment() | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Data too, which an editable installation has whatever pyproject.toml says."""
    missing = listed_files(PACKAGE) - set(wheel.namelist())
    assert not missing, f"{sorted(missing)}; name them in pyproject.toml"


def test_a_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    (about,) = {name.split("/")[0] for name in wheel.namelist()} - {PACKAGE}
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    command = wheel.read(f"{about}/entry_points.txt").decode()
    assert "dear-train = dearmpi.cli.main:main" in command


def test_a_wheel_says_what_it_is_and_no_link_of_its_description_is_dead(
    wheel: zipfile.ZipFile,
) -> None:
    about = metadata(wheel)
    assert about["License-Expression"] == "Apache-2.0" and about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    shown = about.get_payload()
    assert isinstance(shown, str) and "# dearmpi" in shown
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert targets and all(target.startswith("https://") for target in targets), targets


def test_with_the_repositorys_address_links_lead_there() -> None:
    readme = "![p](docs/p.svg) [a](docs/a.md#b) [c](https://c)"
    shown = description(readme, "https://host/dearmpi")
    base = "https://host/dearmpi"
    assert (
        shown
        == f"![p]({base}/raw/main/docs/p.svg) [a]({base}/blob/main/docs/a.md#b) [c](https://c)"
    )
    assert description(readme, None) == " a [c](https://c)"
