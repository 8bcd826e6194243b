"""The batch scripts, with stand-ins for the launchers and for dear-train."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "slurm"
QUEUED_AGAIN = ("train", "train-srun", "array")
ALL = (*QUEUED_AGAIN, "bench")
STARTED = ("dear-train", "requeue", "dear-train", "restart")
SWEEP = "--lr 0.1\n\n# a remark\n--lr 0.2   --optimizer SGD *\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an environment whose programs note their arguments, one to a line, and settings."""
    for name in ("dear-train", "mpirun"):
        path = tmp_path / ".venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" {name} "$@" > {tmp_path}/told\n'
            f"echo $OMP_NUM_THREADS $SLURM_MPI_TYPE > {tmp_path}/settings\n"
            f"echo $SLURM_EXPORT_ENV > {tmp_path}/hidden\nexit 75\n"
        )
        path.chmod(0o755)
    return tmp_path


def run(folder: Path, name: str, *arguments: str, **variables: str) -> list[str]:
    """The words of the command that the script ``name`` ends in."""
    ended = subprocess.run(
        ["bash", SCRIPTS / f"{name}.sbatch", *arguments],
        env={
            "PATH": "/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "17",
            "SLURM_NTASKS": "8",
            "SLURM_CPUS_PER_TASK": "3",
            **variables,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    if ended.returncode != 75:
        raise AssertionError(ended.returncode, ended.stderr)
    return (folder / "told").read_text().splitlines()


def start(folder: Path, name: str, **variables: str) -> list[str]:
    """As ``run``, with what a sweep needs beside."""
    (folder / "sweep.txt").write_text(SWEEP)
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "1"}
    return run(folder, name, *(["sweep.txt"] if name == "array" else []), **array, **variables)


def num_threads(folder: Path) -> str:
    """Torch threads of the rank that was started last."""
    return (folder / "settings").read_text().split()[0]


def follows(words: list[str], *expected: str) -> bool:
    """Whether ``expected`` stand next to each other in ``words``."""
    size = len(expected)
    return any(tuple(words[i : i + size]) == expected for i in range(len(words) - size + 1))


@pytest.mark.parametrize("name", ALL)
def test_without_an_environment_a_script_says_where_it_has_looked(folder: Path, name: str) -> None:
    (folder / ".venv").rename(folder / "elsewhere")
    with pytest.raises(AssertionError) as ended:
        start(folder, name)
    code, said = ended.value.args
    assert code == 127
    assert said.startswith(f"no dear-train in {folder}/.venv/bin: set DEARMPI_VENV")


def test_mpirun_starts_as_many_ranks_as_slurm_has_tasks(folder: Path) -> None:
    words = run(folder, "train", "--task", "my task.py:make", "--lr", "*")
    assert words[:7] == [*STARTED, "mpirun", "-n", "8"]
    assert words[7:9] == ["dear-train", "run"]
    assert follows(words, "--name", "job-17", "--resume", "auto")
    assert words[-4:] == ["--task", "my task.py:make", "--lr", "*"]
    assert (folder / "settings").read_text() == "3 none\n"


def test_srun_starts_them_with_the_pmi_of_the_site(folder: Path) -> None:
    words = run(folder, "train-srun", "--epochs", "3")
    assert words[:6] == [*STARTED, "srun", "--mpi=pmi2"]
    assert "--cpus-per-task=3" in words and follows(words, "dear-train", "run")
    assert words[-2:] == ["--epochs", "3"]
    assert "--mpi=pmix" in run(folder, "train-srun", DEARMPI_PMI="pmix")


@pytest.mark.parametrize("name", ALL)
def test_what_the_script_sets_reaches_the_ranks_where_jobs_start_without_variables(
    folder: Path, name: str
) -> None:
    start(folder, name, SLURM_EXPORT_ENV="NONE")  # which srun would obey, also below mpirun
    assert (folder / "hidden").read_text() == "\n"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("cores", "threads"), [("1", "1"), ("3", "3"), ("4", "3"), ("8", "7")])
def test_a_rank_with_room_leaves_a_core_to_communication(
    folder: Path, name: str, cores: str, threads: str
) -> None:
    """Whatever a login shell has exported: only the site's own variable says otherwise."""
    numbers = {"SLURM_CPUS_PER_TASK": cores, "OMP_NUM_THREADS": "2"}
    start(folder, name, **numbers)
    assert num_threads(folder) == threads
    start(folder, name, **numbers, DEARMPI_THREADS="5")
    assert num_threads(folder) == "5"


def test_a_benchmark_is_not_queued_again(folder: Path) -> None:
    words = run(folder, "bench", "--workload", "resnet50")
    assert words[0] == "mpirun"
    assert words[-4:] == ["dear-train", "bench", "--workload", "resnet50"]


def test_each_job_of_a_sweep_takes_its_line(folder: Path) -> None:
    (folder / "sweep.txt").write_text(SWEEP)
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    words = run(folder, "array", "sweep.txt", "--task", "digits", **array)
    assert follows(words, "--name", "sweep-15-2", "--resume", "auto")
    assert words[-7:] == ["--task", "digits", "--lr", "0.2", "--optimizer", "SGD", "*"]


def test_a_line_of_a_sweep_counts_whatever_its_encoding(folder: Path) -> None:
    (folder / "sweep.txt").write_bytes(b"--lr 0.1\n--data caf\xe9\n--lr 0.3\n")
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3", "LC_ALL": "C.UTF-8"}
    assert run(folder, "array", "sweep.txt", **array)[-2:] == ["--lr", "0.3"]


@pytest.mark.parametrize(
    ("arguments", "index", "message"),
    [
        ([], "1", "name a file"),
        (["nowhere.txt"], "1", "nowhere.txt"),
        (["sweep.txt"], "3", "sweep.txt has 2 runs, but this is job 3 of the array"),
        (["sweep.txt"], "0", "this is job 0 of the array"),
        (["sweep.txt"], "", "sbatch --array"),
    ],
)
def test_a_sweep_without_a_line_for_this_job_says_so(
    folder: Path, arguments: list[str], index: str, message: str
) -> None:
    (folder / "sweep.txt").write_text(SWEEP)
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": index}
    with pytest.raises(AssertionError, match=message) as caught:
        run(folder, "array", *arguments, **(array if index else {}))
    assert caught.value.args[0] == 2


@pytest.mark.parametrize("name", ALL)
def test_the_environment_and_the_folder_of_runs_are_the_sites(folder: Path, name: str) -> None:
    (folder / ".venv").rename(folder / "my env")
    site = {"DEARMPI_VENV": str(folder / "my env"), "DEARMPI_RUNS": "/scratch/my runs"}
    words = start(folder, name, **site)
    assert follows(words, "--run-folder", "/scratch/my runs") == (name != "bench")


@pytest.mark.parametrize("name", QUEUED_AGAIN)
def test_slurm_warns_the_script_and_may_queue_it_again(name: str) -> None:
    lines = (SCRIPTS / f"{name}.sbatch").read_text().splitlines()
    for option in ("--signal=B:USR1@120", "--requeue", "--no-kill", "--open-mode=append"):
        assert f"#SBATCH {option}" in lines
