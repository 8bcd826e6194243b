"""Launch lines: which hosts and ranks a command of mpirun or srun has, and the same elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dearmpi.cli.launch_line import LaunchLine, read_launch_line
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.stand_in import stand_in

EXPORTS = "-x DEARMPI_JOB -x DEARMPI_START"
FOUR = {"n0": 2, "n1": 2, "n2": 2, "n3": 2}


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_in(tmp_path / "bin" / "mpirun", "echo HYDRA build details:")
    stand_in(tmp_path / "bin" / "ompirun", "echo 'mpirun (Open MPI) 5.0.11'")
    stand_in(tmp_path / "bin" / "bash-run", "echo GNU bash")
    stand_in(tmp_path / "bin" / "srun", "exit 1")
    stand_in(tmp_path / "bin" / "train", "exit 1")
    stand_in(tmp_path / "bin" / "scontrol", 'case $3 in "s[0-2]") echo s0; echo s1; echo s2; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "plain").write_text("n0\nn1  # the old one\n\n")
    (tmp_path / "empty").touch()
    (tmp_path / "numbers").write_text("n0:2\nn1 slots=4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, **environment: str) -> LaunchLine:
    return read_launch_line(text.split(), environment)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("mpirun -n 8 -hosts n0,n1,n2,n3 train", FOUR),
        ("mpirun -np 8 -ppn 2 -hosts n0,n1,n2,n3 train -n 3", FOUR),
        ("mpirun --hosts=n0:2,n1:2 -n 4 -launcher ssh -genv A 1 train", {"n0": 2, "n1": 2}),
        ("mpirun -n 5 -hosts n0:1,n1:2 train", {"n0": 2, "n1": 3}),
        ("mpirun -n 1 -hosts n0,n1 train", {"n0": 1}),
        ("mpirun -n 4 -f plain train", {"n0": 2, "n1": 2}),
        ("mpirun -hostfile numbers train", {"n0": 2, "n1": 4}),
        ("mpirun -n 4 train", {}),
        ("ompirun --host n0,n0,n1 train", {"n0": 2, "n1": 1}),
        ("ompirun -np 3 --hostfile numbers --mca btl tcp -x A train", {"n0": 2, "n1": 1}),
        ("ompirun -N 3 -H n0,n1 train", {"n0": 3, "n1": 3}),
    ],
)
def test_each_host_has_the_ranks_that_the_launcher_gives_it(
    command: str, ranks: dict[str, int]
) -> None:
    assert read(command).ranks == ranks


def test_hosts_of_a_slurm_job_are_those_it_was_given() -> None:
    job = {"SLURM_JOB_NODELIST": "s[0-2]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    ranks = {"s0": 2, "s1": 2, "s2": 1}
    assert read("mpirun -n 5 train", **job).ranks == ranks
    assert read("srun --mpi=pmi2 train", **job).ranks == ranks
    assert read("srun -n4 -w s[0-2] train", **job).ranks == {"s0": 2, "s1": 2}
    assert read("mpirun -n 2 -hosts n0,n1 train", **job).ranks == {"n0": 1, "n1": 1}


def test_the_variable_of_mpich_names_a_file_of_hosts() -> None:
    assert read("mpirun -n 4 train", HYDRA_HOST_FILE="plain").ranks == {"n0": 2, "n1": 2}


QUEUE = "n0\nn0\nn0\nn1\nn1\nn1\n"  # a line for each place, as PBS and LSF write it


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PBS_NODEFILE", "queue"), ("LSB_DJOB_HOSTFILE", "queue"), ("LSB_HOSTS", QUEUE)],
)
def test_hosts_of_a_job_in_pbs_or_lsf_have_as_many_ranks_as_places(
    variable: str, value: str, programs: Path
) -> None:
    (programs / "queue").write_text(QUEUE)
    job = {variable: value.replace("\n", " ") if value == QUEUE else value}
    for command in ("mpirun", "ompirun"):
        assert read(f"{command} -n 6 train", **job).ranks == {"n0": 3, "n1": 3}
        assert read(f"{command} -n 4 train", **job).ranks == {"n0": 3, "n1": 1}
        assert read(f"{command} train", **job).ranks == {"n0": 3, "n1": 3}
        assert read(f"{command} -n 2 -host n4,n5 train", **job).ranks == {"n4": 1, "n5": 1}
    assert read("srun -n 2 train", **job).ranks == {}  # which SLURM alone starts
    slurm = {"SLURM_JOB_NODELIST": "s[0-2]", "SLURM_TASKS_PER_NODE": "2(x3)"}
    assert read("mpirun -n 6 train", **job, **slurm).ranks == {"s0": 2, "s1": 2, "s2": 2}
    line = read("mpirun -n 6 train", **job)
    assert " ".join(line.on(["n1"])) == "mpirun -hosts n1:3 -n 3 train"


def test_of_lsf_the_file_goes_before_the_list_and_a_lost_file_is_told() -> None:
    job = {"LSB_DJOB_HOSTFILE": "numbers", "LSB_HOSTS": "n7 n8"}
    assert read("mpirun -n 6 train", **job).ranks == {"n0": 2, "n1": 4}
    with raises(ConfigError, "file-missing", "nowhere"):
        read("mpirun -n 6 train", PBS_NODEFILE="nowhere")


@pytest.mark.parametrize(
    ("command", "elsewhere", "probe"),
    [
        (
            "mpirun -n 6 -launcher ssh -hosts n0,n1,n2 -ppn 2 -iface eth0 train -n 1",
            "mpirun -hosts n0:2,n2:2 -n 4 -launcher ssh -iface eth0 train -n 1",
            "mpirun -hosts n2:1 -n 1 -launcher ssh -iface eth0 true",
        ),
        (
            "ompirun --host n0,n1,n2 --map-by ppr:1:node --bind-to none train",
            f"ompirun --host n0:1,n2:1 -n 2 {EXPORTS} --map-by ppr:1:node --bind-to none train",
            f"ompirun --host n2:1 -n 1 {EXPORTS} --map-by ppr:1:node --bind-to none true",
        ),
    ],
)
def test_a_line_starts_each_hosts_ranks_on_the_hosts_that_are_left(
    command: str, elsewhere: str, probe: str
) -> None:
    line = read(command)
    assert " ".join(line.given).replace(f" {EXPORTS}", "") == command
    assert " ".join(line.on(["n0", "n2"])) == elsewhere
    assert " ".join(line.probe("n2")) == probe


def test_srun_is_given_fewer_nodes() -> None:
    job = {"SLURM_JOB_NODELIST": "s[0-2]", "SLURM_TASKS_PER_NODE": "2(x3)"}
    line = read("srun -N 3 -n 6 --mpi=pmi2 -c 1 train", **job)
    assert " ".join(line.on(["s0", "s2"])) == (
        "srun --mpi=pmi2 -c 1 --nodelist=s0,s2 --nodes=2 --ntasks=4 train"
    )


def test_two_dashes_tell_the_program_from_options_of_which_nothing_is_known() -> None:
    line = read("mpirun -n 2 -hosts n0,n1 -odd 3 -- elsewhere/train -x -- y")
    assert line.program == ("elsewhere/train", "-x", "--", "y")
    assert " ".join(line.on(["n1"])) == "mpirun -hosts n1:1 -n 1 -odd 3 elsewhere/train -x -- y"
    assert " ".join(line.given) == "mpirun -n 2 -hosts n0,n1 -odd 3 elsewhere/train -x -- y"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("bash-run train", "unknown-choice", "bash-run"),
        ("no-such-mpirun -n 2 train", "command-not-started", "no-such-mpirun"),
        ("mpirun -n 2", "command-not-started", "no program"),
        ("mpirun -odd 3 train", "command-not-started", "'3'"),
        ("mpirun -n 2 train : -n 1 train", "settings-contradict", "several programs"),
        ("mpirun -n 0 train", "malformed-value", "'0'"),
        ("mpirun -n many train", "malformed-value", "'many'"),
        ("mpirun -hosts n0,,n1 train", "malformed-value", "empty name"),
        ("mpirun -hosts n0:none train", "malformed-value", "'none'"),
        ("mpirun -f nowhere train", "file-missing", "nowhere"),
        ("mpirun -f /dev/null train", "file-missing", "/dev/null: it is a device"),
        ("mpirun -f empty train", "malformed-value", "empty names none"),
    ],
)
def test_a_line_that_no_launcher_takes_is_refused_before_the_start(
    command: str, code: str, words: str
) -> None:
    with raises(ConfigError, code, words):
        read(command)
