"""What the order of ranks over hosts costs, and how to have another."""

from __future__ import annotations

import pytest

from dearmpi.comm.library import Library
from dearmpi.doctor import launch
from dearmpi.doctor.finding import Finding

MPICH = Library("MPICH", "5.0.2", "4.1.2", "mpich", "MPI_THREAD_MULTIPLE", "ch4:ofi")


def judge(*hosts: str, **environment: str) -> Finding:
    return launch.judge_launch(hosts, MPICH, joined=True, environment=environment)


@pytest.mark.parametrize(
    "hosts",
    [
        ("n0", "n0", "n1", "n1"),
        ("n1", "n0", "n2"),
        ("n0", "n1", "n1", "n0"),  # the last sends to the first
        ("n0", "n0"),
    ],
)
def test_ranks_that_follow_each_other_on_a_host_are_fine(hosts: tuple[str, ...]) -> None:
    assert judge(*hosts, PMI_SIZE="4").status == "ok"


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        ({"HYDI_CONTROL_FD": "7"}, "mpirun -ppn 8"),
        ({"PRTE_LAUNCHED": "1"}, "mpirun --map-by slot"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16"}, "srun --distribution=block"),
    ],
)
def test_cyclic_ranks_are_a_warning_with_the_cure_of_the_launcher(
    environment: dict[str, str], cure: str
) -> None:
    found = judge(*("n0", "n1") * 8, **environment)
    assert found.status == "warn"
    assert found.said.startswith("16 ranks on 2 hosts (n0: 8, n1: 8), started by ")
    assert "n0 has ranks 0, 2, 4, 6 and 4 more." in found.said
    assert "carries 8 times the bytes" in found.said
    assert found.cure == f"number the ranks host by host: {cure}"


def test_the_host_that_pays_most_is_named_and_every_launcher_where_none_is_known() -> None:
    found = judge("n0", "n1", "n1", "n2", "n1", "n2", PMI_SIZE="6")
    assert "n1 has ranks 1, 2, 4." in found.said and "carries 2 times" in found.said
    for option in ("mpirun -ppn 3 (Hydra)", "--map-by slot", "--distribution=block"):
        assert option in found.cure
