"""bin/setup, with stand-ins for Python and flock: who may set up, and when nothing is to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.stand_in import stand_in

ROOT = Path(__file__).parents[1]

# Of all that it is asked it only makes environments, each with itself inside.
PYTHON = """case "$*" in
    -VV) echo Python 3.12.0 ;;
    "-m venv "*)
        for folder in "$@"; do :; done
        mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python"
        ;;
esac"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("bin/setup", "bin/constraints.txt", "pyproject.toml"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    stand_in(tmp_path / "programs" / "python", PYTHON)
    return tmp_path / "checkout"


def set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    programs = checkout.parent / "programs"
    return subprocess.run(
        [checkout / "bin" / "setup"],
        env={"PATH": f"{programs}:/usr/bin:/bin", "PYTHON": str(programs / "python")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def forbid_locks(checkout: Path) -> None:
    """As in a folder of somebody else's; root may write to those."""
    (checkout / ".setup.lock").unlink(missing_ok=True)
    (checkout / ".setup.lock").mkdir()


def test_an_environment_that_is_current_serves_those_who_cannot_write_to_it(checkout: Path) -> None:
    assert set_up(checkout).returncode == 0
    forbid_locks(checkout)
    again = set_up(checkout)
    assert (again.returncode, again.stderr) == (0, "")


def test_a_checkout_that_cannot_be_written_to_is_told_of(checkout: Path) -> None:
    forbid_locks(checkout)
    ended = set_up(checkout)
    assert ended.returncode == 1
    assert f"cannot write to {checkout}; set up as its owner" in ended.stderr


def test_where_the_file_system_knows_no_locks_it_goes_on(checkout: Path) -> None:
    refusing = 'echo "flock: 9: Function not implemented" >&2; exit 65'
    stand_in(checkout.parent / "programs" / "flock", refusing)
    ended = set_up(checkout)
    assert ended.returncode == 0 and "Waiting" not in ended.stderr
    assert (checkout / ".venv" / "stamp-demo").exists()


def test_a_lock_that_is_held_is_waited_for(checkout: Path) -> None:
    stand_in(checkout.parent / "programs" / "flock", '[ "$1" != --nonblock ]')
    ended = set_up(checkout)
    assert ended.returncode == 0
    assert f"Waiting for another set-up in {checkout}." in ended.stderr
