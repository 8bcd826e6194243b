"""Each check's judgement of what was found."""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dearmpi.bench.collective_times import Overlap
from dearmpi.comm.process import Library
from dearmpi.doctor import launcher as launch
from dearmpi.doctor.finding import Finding, RankFacts, exit_code, read_quota, relevant
from dearmpi.doctor.host_network import (
    Link,
    MeasuredNetwork,
    algorithms_in_use,
    judge_network,
    judge_overlap,
    judge_tcp,
    judge_transport,
)
from dearmpi.doctor.machine import (
    EXTRAS,
    abbreviate,
    is_crowded,
    judge_cores,
    judge_devices,
    judge_extras,
    judge_software,
    judge_workers,
)
from dearmpi.train.ranks.device import VisibleGpus
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.unit.doctor.ranks import rank

ROOT = Path(__file__).resolve().parents[3]
MPICH = Library("MPICH", "5.0.2", "4.1.2", "mpich", "MPI_THREAD_MULTIPLE", "ch4:ofi")


def check(finding: Finding, status: str, *words: str) -> None:
    text = f"{finding.said}\n{finding.cure}"
    assert finding.status == status, text
    assert all(word in text for word in words), text


def test_tcp_that_pauses_is_a_warning() -> None:
    assert judge_tcp({}) is None
    found = judge_tcp({"n0": "cubic", "n1": "cubic reno"})
    assert found is not None
    check(found, "ok", "between hosts: cubic, cubic reno")
    found = judge_tcp({"n0": "cubic", **{f"n{number}": "bbr" for number in range(1, 7)}})
    assert found is not None
    check(found, "warn", "bbr on n1, n2, n3, n4 and 2 more", "0.2 s", "=cubic")


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux alone tells")
def test_connections_to_other_addresses_are_asked_what_they_use() -> None:
    before = algorithms_in_use()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address), server.accept()[0]:  # one address: the same host
            assert algorithms_in_use() == before
        with (
            socket.create_connection(address, source_address=("127.0.0.2", 0)) as one,
            server.accept()[0] as other,
        ):
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            assert "reno" in algorithms_in_use()
            one.sendall(b"x")  # and they still work
            assert other.recv(1) == b"x"


def library(**changes: str) -> Library:
    names = {name: getattr(MPICH, name) for name in Library.__slots__}
    return Library(**(names | changes))


def test_a_missing_library_is_a_failure_with_its_reason() -> None:
    check(launch.judge_library(MPICH, ""), "ok", "MPICH 5.0.2 (ch4:ofi)", "ABI: mpich")
    check(
        launch.judge_library(None, "cannot load MPI library"),
        "fail",
        "cannot load MPI library",
        "pip install 'dearmpi[mpich]'",
    )


def test_less_than_full_thread_support_is_a_warning() -> None:
    check(launch.judge_thread_level(MPICH), "ok", "MPI_THREAD_MULTIPLE")
    funneled = library(thread_level="MPI_THREAD_FUNNELED")
    finding = launch.judge_thread_level(funneled)
    check(finding, "warn", "MPI_THREAD_FUNNELED", "cannot train on CUDA", "MPI4PY_RC_THREAD")
    serialized = launch.judge_thread_level(library(thread_level="MPI_THREAD_SERIALIZED"))
    assert "CUDA" not in serialized.said


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, ""),
        ({"HYDI_CONTROL_FD": "7", "PMI_SIZE": "2", "SLURM_STEP_ID": "0"}, "mpirun (Hydra)"),
        ({"PRTE_LAUNCHED": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun (Open MPI)"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2"}, "srun"),
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"PMI_SIZE": "2"}, "a launcher that speaks PMI"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_STEP_ID": "0"}, "torchrun"),
    ],
)
def test_the_launcher_is_known_by_its_variables(environment: dict[str, str], name: str) -> None:
    assert launch.name_launcher(environment) == name


SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("vendor", "flag"), [("MPICH", "srun --mpi=pmi2"), ("Open MPI", "srun --mpi=pmix")]
)
def test_ranks_that_did_not_find_each_other_are_told_the_right_flag(vendor: str, flag: str) -> None:
    finding = launch.judge_launch(["n0"], library(name=vendor), joined=False, environment=SRUN)
    check(finding, "fail", "4 processes", "srun", f"mpirun that belongs to {vendor}", flag)


def test_ranks_without_mpi_are_told_how_to_get_it() -> None:
    finding = launch.judge_launch(["n0"], None, joined=False, environment=SRUN)
    check(finding, "fail", "4 processes", "dearmpi[mpich]")


def test_ranks_are_counted_by_host() -> None:
    def said(*hosts: str, **environment: str) -> str:
        return launch.judge_launch(hosts, MPICH, joined=True, environment=environment).said

    assert said("n0").startswith("1 rank on n0, no launcher")
    assert said("n0", "n0", PMI_SIZE="2").startswith("2 ranks on n0, started by a launcher")
    assert said("n1", "n0", "n1", PMI_SIZE="3").startswith("3 ranks on 2 hosts (n1: 2, n0: 1), ")
    assert "(n0: 1, n1: 1, " in said(*(f"n{i}" for i in range(20))) and "and 12 more" in said(
        *(f"n{i}" for i in range(20))
    )


@pytest.mark.parametrize(
    ("mpirun", "words"),
    [
        (launch.Mpirun(), ["no mpirun", "dearmpi[mpich]"]),
        (launch.Mpirun(own="/env/bin/mpirun", has_srun=True), ["no mpirun", "/env/bin/mpirun"]),
        (
            launch.Mpirun("/usr/bin/mpirun", "Open MPI", own="/env/bin/mpirun"),
            ["/usr/bin/mpirun belongs to Open MPI", "library is MPICH", "call /env/bin/mpirun"],
        ),
        (
            launch.Mpirun("/usr/bin/mpirun", "Open MPI"),
            ["/usr/bin/mpirun belongs to Open MPI", "the mpirun that belongs to MPICH"],
        ),
    ],
)
def test_an_mpirun_that_cannot_start_several_ranks_is_a_warning(
    mpirun: launch.Mpirun, words: list[str]
) -> None:
    found = launch.judge_launch(["n0"], MPICH, joined=True, environment={}, mpirun=mpirun)
    check(found, "warn", "1 rank on n0", *words)


@pytest.mark.parametrize(
    "mpirun",
    [
        launch.Mpirun("/env/bin/mpirun", "MPICH", own="/env/bin/mpirun"),
        launch.Mpirun("/opt/cray/mpirun"),
        launch.Mpirun(has_srun=True),
    ],
)
def test_an_mpirun_that_may_start_several_ranks_is_fine(mpirun: launch.Mpirun) -> None:
    check(launch.judge_launch(["n0"], MPICH, joined=True, environment={}, mpirun=mpirun), "ok")
    several = launch.judge_launch(
        ["n0", "n0"], MPICH, joined=True, environment={"PMI_SIZE": "2"}, mpirun=launch.Mpirun()
    )
    check(several, "ok")


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("HYDRA build details:", "MPICH"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("Intel(R) MPI Library", ""),
    ],
)
def test_an_mpirun_is_known_by_its_version(
    text: str, mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\necho '{text}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = launch.find_mpirun()
    assert (found.path, found.mpi, found.has_srun) == (str(script), mpi, False)
    script.unlink()
    assert not launch.find_mpirun().path


ASKED_BY_VARIABLE = {"threads_asked": True, "environment": {"DEAR_TRAIN_THREADS": "2"}}


@pytest.mark.parametrize(
    ("ranks", "status", "words"),
    [
        ([rank(0, cores=(0,)), rank(1, cores=(1,))], "ok", ["rank 1: cores 1, threads 1"]),
        ([rank(i, cores=(0, 1)) for i in range(3)], "warn", ["3 ranks", "2 cores", "at most 2"]),
        ([rank(i, threads=2) for i in range(2)], "warn", ["4 torch threads", "OMP_NUM_THREADS=1"]),
        (
            [rank(i, threads=2, **ASKED_BY_VARIABLE) for i in range(2)],
            "warn",
            ["4 torch threads", "DEAR_TRAIN_THREADS=1, or leave it unset"],
        ),
        (
            [rank(i, threads=2, threads_asked=True) for i in range(2)],
            "warn",
            ["DEAR_TRAIN_THREADS=1", "leave threads out", "DEAR_TRAIN_CONFIG"],
        ),
        (
            [rank(0, threads=2, quota=1.0)],
            "warn",
            ["1 cores' worth", "set OMP_NUM_THREADS=1"],
        ),
        (
            [rank(0, threads=2, quota=1.0, threads_asked=True)],
            "warn",
            ["1 cores' worth", "set DEAR_TRAIN_THREADS=1"],
        ),
        ([rank(0, quota=0.5)], "warn", ["0.5 cores", "want 1"]),
        ([rank(0, quota=2.0)], "ok", []),
        (
            [rank(i, cores=range(4), quota=2.0) for i in range(4)],
            "warn",
            ["2 cores' worth", "start at most 2 ranks there"],
        ),
        (
            [rank(0), rank(1, host="n1", cores=(3,), threads=2)],
            "warn",
            ["n1", "2 torch threads of 1 rank on", "1 core "],
        ),
        ([rank(i, cores=range(8)) for i in range(8)], "ok", ["every rank: cores 0-7, threads 1"]),
        (
            [rank(i, cores=range(8 + i)) for i in range(8)],
            "ok",
            ["8 to 15 cores", "1 thread"],
        ),
    ],
)
def test_threads_are_held_against_cores(
    ranks: list[RankFacts], status: str, words: list[str]
) -> None:
    check(judge_cores(ranks), status, *words)


def test_scripts_that_begin_with_other_threads_are_told_what_to_set() -> None:
    def said(**changes: object) -> str:
        return judge_cores([rank(i, cores=range(16), **changes) for i in range(2)]).said

    assert said(threads=7).endswith("begins with 1 thread: start it with OMP_NUM_THREADS=7")
    assert "script" not in said(threads=7, script_threads=7)
    assert "script" not in said(threads=7, environment={"OMP_NUM_THREADS": "7"})


def test_only_more_ranks_than_cores_are_a_crowd() -> None:
    assert not is_crowded([rank(0, threads=8), rank(1, threads=8)])
    assert is_crowded([rank(0), rank(1, host="n1", cores=(0,)), rank(2, host="n1", cores=(0,))])


def test_core_numbers_are_joined() -> None:
    assert abbreviate([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_rank_with_another_version_is_named() -> None:
    check(judge_software([rank(0), rank(1)]), "ok", "torch 2.13.0")
    other = rank(1, host="n1", versions={"python": "3.12.1", "torch": "2.12.0"})
    check(
        judge_software([rank(0), other]), "fail", "2.13.0 on rank 0 (n0)", "2.12.0 on rank 1 (n1)"
    )


def test_a_rank_without_what_training_needs_is_named() -> None:
    lacking = rank(1, host="n1", versions={"python": "3.12.1", "safetensors": "missing"})
    finding = judge_software([rank(0), lacking])
    check(finding, "fail", "safetensors is missing on rank 1 (n1)", "pip install safetensors")
    assert exit_code([finding]) == 1
    alone = rank(0, versions={"python": "3.12.1", "mpi4py": "missing"})
    check(judge_software([alone]), "ok")


def test_what_is_not_installed_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"Pillow": "13.0", "timm": "1.0"}
    monkeypatch.setattr("dearmpi.doctor.machine.installed_version", versions.get)
    check(
        judge_extras(),
        "ok",
        "Pillow 13.0, timm 1.0",
        "[digits,transformers,torchvision,tensorboard,wandb,mlflow]",
    )


def test_every_extra_that_an_optional_library_brings_is_looked_for() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    for distribution, extra in EXTRAS.items():
        assert any(re.match(rf"{distribution}\b", needed) for needed in extras[extra])
    of_others = {"mpich", "openmpi", "frameworks", "test", "docs"}
    assert set(EXTRAS.values()) == set(extras) - of_others


@pytest.mark.parametrize(
    ("method", "infiniband", "environment", "status"),
    [
        ("forkserver", ("mlx5_0",), {}, "ok"),
        ("fork", (), {}, "ok"),
        ("fork", ("mlx5_0",), {}, "warn"),
        ("fork", ("mlx5_0",), {"RDMAV_FORK_SAFE": "1"}, "ok"),
    ],
)
def test_a_fork_beside_infiniband_is_a_warning(
    method: str, infiniband: tuple[str, ...], environment: dict[str, str], status: str
) -> None:
    check(judge_workers(method, infiniband, environment), status)


@pytest.mark.parametrize(
    ("environment", "infiniband", "crowded", "status", "word"),
    [
        ({}, (), False, "ok", "own choice"),
        ({"FI_PROVIDER": "tcp"}, (), False, "ok", "FI_PROVIDER=tcp"),
        ({"FI_PROVIDER": "tcp"}, ("mlx5_0",), False, "warn", "unset FI_PROVIDER"),
        ({"UCX_TLS": "tcp,self"}, ("mlx5_0",), False, "warn", "unset UCX_TLS"),
        ({"UCX_TLS": "rc_x,tcp"}, ("mlx5_0",), False, "ok", "UCX_TLS"),
        ({"MPIR_CVAR_ASYNC_PROGRESS": "1"}, (), False, "warn", "unset MPIR_CVAR_ASYNC_PROGRESS"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (), True, "warn", "mpi_yield_when_idle=1"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (), False, "ok", ""),
        ({"PMI_SIZE": "4"}, (), True, "ok", ""),
    ],
)
def test_settings_that_slow_messages_down_are_found(
    environment: dict[str, str], infiniband: tuple[str, ...], crowded: bool, status: str, word: str
) -> None:
    check(judge_transport(environment, infiniband, crowded=crowded), status, word)


def network(*rates: float, between_hosts: bool = True) -> MeasuredNetwork:
    links = [Link(f"n{i}", f"n{(i + 1) % len(rates)}", rate) for i, rate in enumerate(rates)]
    return MeasuredNetwork(between_hosts, 0.0002, tuple(links))


def test_a_slow_link_is_named() -> None:
    check(judge_network(network(9.4e8, 9.3e8)), "ok", "2 hosts", ": 940 Mbit/s", "200 us")
    check(judge_network(network(9.4e8, 6e8)), "ok", ": 600 Mbit/s to 940 Mbit/s each way")
    slow = judge_network(network(9.4e8, 9.3e8, 1e8, 9.4e8))
    check(slow, "warn", "100 Mbit/s to 940 Mbit/s", "from n2 to n3", "those of n2 and n3")
    # Ranks of one host share its memory and cores: there is no link to replace.
    check(judge_network(network(1e10, 1e9, between_hosts=False)), "ok", "1.0 Gbit/s to 10.0 Gbit/s")


def test_little_overlap_is_a_warning() -> None:
    check(judge_overlap(4_000_000, Overlap(0.01, 0.01, 0.0104)), "ok", "96%", "4.0 MB", "10.0 ms")
    check(judge_overlap(4_000_000, Overlap(0.01, 0.01, 0.018)), "warn", "20%", "cores")


def verdicts(*works: str, output: str = "") -> list[ProbeVerdict]:
    return [
        ProbeVerdict(name, works=name in works, output="" if name in works else output)
        for name in OPERATIONS
    ]


def test_devices_are_named_with_what_mpi_does_on_their_memory() -> None:
    ranks = [rank(i, devices=("H200", "H200")) for i in range(2)]
    check(judge_devices([rank()], ()), "ok", "no device")
    check(judge_devices(ranks, verdicts(*OPERATIONS)), "ok", "2 on n0: H200", "ring, exchange")
    finding = judge_devices(
        ranks, verdicts("all-gather", "exchange", output="Segmentation fault\n\n")
    )
    check(finding, "ok", "memory: all-gather, exchange; not: native, ring (Segmentation fault)")
    check(judge_devices(ranks, verdicts(output="no mpiexec")), "ok", "nothing", "(no mpiexec)")
    apart = [rank(i, host=f"n{i}", devices=("H200",)) for i in range(2)]
    check(judge_devices(apart, verdicts(*OPERATIONS)), "ok", "auto: staged", "one of 2 hosts")


def test_a_rank_without_device_among_others_is_a_warning() -> None:
    ranks = [rank(0, devices=("H200",)), rank(1, host="n1")]
    check(judge_devices(ranks, ()), "warn", "rank 1 on n1", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "gpus", [VisibleGpus(0, 4, 0, "why", "how"), VisibleGpus(0, 0, 4, "why", "how")]
)
def test_gpus_that_torch_cannot_use_are_a_warning(gpus: VisibleGpus) -> None:
    ranks = [rank(0), rank(1, host="n1", gpus=gpus)]
    check(judge_devices(ranks, ()), "warn", "rank 1 on n1", "4 GPUs", "(why)", "how")


@pytest.mark.parametrize(
    ("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)]
)
def test_a_container_s_quota_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    path = tmp_path / "cpu.max"
    assert read_quota(path) is None
    path.write_text(text)
    assert read_quota(path) == quota


def test_variables_that_may_hold_secrets_are_left_out() -> None:
    environment: dict[str, Any] = {"FI_PROVIDER": "tcp", "AWS_SECRET": "x", "HOME": "/root"}
    assert relevant(environment) == {"FI_PROVIDER": "tcp"}
