"""dear-train restart, with a stand-in for mpirun that loses hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dearmpi.cli import restart as module
from dearmpi.cli.main import main
from tests.stand_in import stand_in

# Notes its arguments; what it is given as ``true`` fails on a host that is dead. Else it does what
# the first line of the file ``next`` says, which it removes.
MPIRUN = """
[ "$1" != --version ] || { echo HYDRA; exit; }
case "$*" in
*" true")
    [ ! -e hangs ] || { touch probed; sleep "$(cat hangs)"; }
    [ ! -e "dead-${2%:*}" ]
    exit ;;
esac
echo "$DEARMPI_START: $*" >>starts
line=$(head -n 1 next); sed -i 1d next; eval "$line"
"""
COMMAND = ("mpirun", "-hosts", "n0,n1,n2", "-n", "6", "python", "script.py")
LOST = "touch dead-n1; exit 255"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    queues = ("SLURM_", "PBS_", "LSB_", "DEAR_TRAIN_")
    for name in [name for name in os.environ if name.startswith(queues)]:
        monkeypatch.delenv(name)
    stand_in(tmp_path / "bin" / "mpirun", MPIRUN)
    stand_in(tmp_path / "bin" / "dear-train", "exit 1")  # it is looked for, and not started here
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ends(folder: Path, *lines: str) -> None:
    """What each start does."""
    (folder / "next").write_text("".join(f"{line}\n" for line in lines))


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def test_a_lost_host_is_left_out_and_each_other_keeps_its_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(folder, LOST, "exit 0")
    assert main(["restart", *COMMAND]) == 0
    assert starts(folder) == [
        "0: -hosts n0,n1,n2 -n 6 python script.py",
        "1: -hosts n0:2,n2:2 -n 4 python script.py",
    ]
    told = capsys.readouterr().err
    assert "ended with 255" in told and "no answer from n1: going on with 4 of 6 ranks" in told


def test_a_host_that_is_back_has_its_ranks_again(folder: Path) -> None:
    ends(folder, LOST, "rm dead-n1; exit 9", "exit 0")
    assert main(["restart", *COMMAND]) == 0
    assert starts(folder)[2] == "2: -hosts n0:2,n1:2,n2:2 -n 6 python script.py"


@pytest.mark.parametrize("code", [8, 9, 255, 134, 137])
def test_what_a_lost_rank_leaves_is_started_again(folder: Path, code: int) -> None:
    ends(folder, f"exit {code}", "exit 0")
    assert main(["restart", *COMMAND]) == 0
    assert len(starts(folder)) == 2


@pytest.mark.parametrize("code", [6, 11])
def test_an_abort_is_told_from_a_checkpoint_that_no_start_can_read(folder: Path, code: int) -> None:
    """MPICH's launcher has one number for both, so a start has to have saved."""
    (folder / "runs/a").mkdir(parents=True)
    ends(folder, f"echo step-1 >runs/a/latest; exit {code}", f"exit {code}", "exit 0")
    assert main(["restart", "--run", "runs/a", *COMMAND]) == code
    assert len(starts(folder)) == 2


@pytest.mark.parametrize("code", [0, 1, 2, 4, 6, 7, 75, 130])
def test_any_other_end_is_the_commands_own(folder: Path, code: int) -> None:
    ends(folder, f"exit {code}")
    assert main(["restart", *COMMAND]) == code
    assert len(starts(folder)) == 1


def test_starts_that_bring_no_new_checkpoint_come_to_an_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(folder, *["exit 9"] * 9)
    assert main(["restart", "--max-restarts", "2", *COMMAND]) == 9
    assert len(starts(folder)) == 3
    told = capsys.readouterr().err
    assert "2 restarts in a row" in told and "no start took 10 s" in told


def test_starts_that_train_and_do_not_save_are_told_apart(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SOON_S", 0.0)
    ends(folder, *["exit 9"] * 9)
    assert main(["restart", "--max-restarts", "1", *COMMAND]) == 9
    assert "name the script's run folder by --run" in capsys.readouterr().err
    assert main(["restart", "--max-restarts", "1", "--run", "runs/a", *COMMAND]) == 9
    assert "no new checkpoint in runs/a; save more often" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ("--run", "runs/a", *COMMAND),
        (*COMMAND[:-2], "dear-train", "run", "--name", "a", "--resume", "auto"),
        (*COMMAND[:-2], "python", "-m", "dearmpi", "run", "--name", "a", "--resume", "auto"),
    ],
)
def test_a_start_that_saves_does_not_count(folder: Path, given: tuple[str, ...]) -> None:
    (folder / "runs/a").mkdir(parents=True)
    saves = "echo checkpoints/step-{} >runs/a/latest; exit 9"
    ends(folder, "exit 9", saves.format(1), saves.format(2), "exit 9", "exit 9")
    assert main(["restart", "--max-restarts", "1", *given]) == 9
    assert len(starts(folder)) == 4


def test_where_no_host_answers_nothing_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(folder, "touch dead-n0 dead-n1 dead-n2; exit 255")
    assert main(["restart", *COMMAND]) == 255
    assert "none of 3 hosts answers; start the same command" in capsys.readouterr().err


def test_a_host_that_does_not_answer_in_time_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROBE_S", 0.2)
    ends(folder, "echo 60 >hangs; exit 255")
    assert main(["restart", *COMMAND]) == 255
    assert "none of 3 hosts answers" in capsys.readouterr().err


def test_without_hosts_the_same_command_starts_again(folder: Path) -> None:
    ends(folder, "exit 9", "exit 0")
    assert main(["restart", "mpirun", "-n", "6", "python", "script.py"]) == 0
    assert starts(folder) == ["0: -n 6 python script.py", "1: -n 6 python script.py"]


@pytest.mark.parametrize(
    ("words", "code"),
    [("trap 'exit 75' USR1; touch ready; while :; do sleep 0.05; done", 75),
     ("trap 'exit 137' USR1; touch ready; while :; do sleep 0.05; done", 137)],
)  # fmt: skip
def test_a_job_that_is_asked_to_stop_is_not_started_again(
    folder: Path, words: str, code: int
) -> None:
    ends(folder, words, "exit 0")
    with subprocess.Popen([sys.executable, "-m", "dearmpi.cli.main", "restart", *COMMAND]) as job:
        wait_for(folder / "ready")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=180) == code
    assert len(starts(folder)) == 1


def test_a_stop_between_two_starts_leaves_the_next_to_the_queue(folder: Path) -> None:
    ends(folder, "echo 1 >hangs; exit 255", "exit 0")
    command = [sys.executable, "-m", "dearmpi.cli.main", "restart", *COMMAND]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        wait_for(folder / "probed")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=180) == 75
        assert job.stderr is not None and "a stop was asked for" in job.stderr.read()
    assert len(starts(folder)) == 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dear-train", "run", "--name", "a"), "--resume auto"),
        (("dear-train", "run", "--resume", "auto"), "--name NAME"),
        (("dear-train", "run", "--name", "a", "--resume", "runs/b"), "'runs/b'"),
        (("dear-train", "run", "--name", "a", "--epoch", "3"), "--epoch"),
    ],
)
def test_a_run_that_a_second_start_would_not_go_on_with_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    stand_in(folder / "bin" / "dear-train", "exit 1")
    assert main(["restart", *COMMAND[:-2], *arguments]) == 2
    assert words in capsys.readouterr().err and not (folder / "starts").exists()


def test_a_folder_of_ones_own_is_refused_beside_that_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("dear-train", "run", "--name", "a", "--resume", "auto")
    stand_in(folder / "bin" / "dear-train", "exit 1")
    assert main(["restart", "--run", "runs/b", *COMMAND[:-2], *run]) == 2
    assert "leave out --run" in capsys.readouterr().err
