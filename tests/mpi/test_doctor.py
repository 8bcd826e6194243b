"""dear-train doctor on ranks that can reach each other, and its probe of device memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.comm.world import World
from dearmpi.doctor.host_network import measure_hiding, measure_network
from dearmpi.tune import device_probe
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict, probe
from tests.forks import forked


@pytest.mark.ranks(2)
def test_rank_0_speaks_for_all(
    world: World, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", "--run-folder", str(shared_tmp_path)])
    assert world.all_reduce([code], "max") == [0.0]
    text = capsys.readouterr().out
    if not world.is_root:
        assert not text
        return
    assert "2 ranks on" in text and "started by mpirun" in text
    assert " way, " in text and "of a reduce-scatter of" in text
    assert not list(shared_tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_a_failure_that_rank_0_alone_sees_ends_all_ranks_alike(
    shared_tmp_path: Path, world: World
) -> None:
    file = shared_tmp_path / "file"
    if world.is_root:
        file.touch()
    world.barrier()
    assert main(["doctor", "--run-folder", str(file)]) == 2


@pytest.mark.ranks(2, 3)
def test_every_link_is_measured(world: World) -> None:
    channel = world.open_channel("doctor", window=1)
    network = measure_network(world, channel)
    assert not network.between_hosts and network.latency_s > 0
    assert [(link.sender, link.receiver) for link in network.links] == [
        (f"rank {(rank - 1) % world.size}", f"rank {rank}") for rank in range(world.size)
    ]
    assert all(link.bits_s > 0 for link in network.links)
    nbytes, overlap = measure_hiding(world, channel, network)
    assert nbytes % (4 * world.size) == 0 and overlap.pure_s > 0
    channel.close()


def fork(*arguments: str) -> tuple[str, ...]:
    """A program that starts as a fork."""
    return tuple(map(str, forked([sys.executable, *arguments])))


@pytest.mark.ranks(1)
def test_operations_are_tried_by_two_processes() -> None:
    verdicts = probe("cpu", program=fork("-m", device_probe.__name__))
    assert verdicts == tuple(ProbeVerdict(name, works=True) for name in OPERATIONS)


@pytest.mark.ranks(1)
def test_an_operation_that_kills_is_found_and_the_others_are_tried(tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import os, sys\n"
        "first = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '0'\n"
        "if not first: raise SystemExit  # or it might die before the first has spoken\n"
        "print('ready to try', flush=True)\n"
        "for name in sys.argv[2:]:\n"
        "    if name == 'native': os.kill(os.getpid(), 11)\n"
        "    print(f'works: {name}', flush=True)\n"
    )
    verdicts = probe("cuda", program=(sys.executable, str(stand_in)))
    assert [v.operation for v in verdicts] == list(OPERATIONS)
    assert [v.operation for v in verdicts if not v.works] == ["native"]
    assert next(v.output for v in verdicts if not v.works)


WRONG_ON_RANK_1 = """
import sys, time
from dearmpi.tune import device_probe

works = device_probe._works

def late_and_wrong(collectives, device, operation):
    right = works(collectives, device, operation)
    if collectives.rank == 1 and operation == "ring":
        time.sleep(0.5)  # rank 0 has long been right
        return False
    return right

device_probe._works = late_and_wrong
sys.exit(device_probe.main(sys.argv[1:]))
"""


@pytest.mark.ranks(1)
def test_what_works_for_one_rank_only_does_not_work(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_ON_RANK_1)
    verdicts = probe("cpu", program=fork(str(script)))
    assert [verdict.operation for verdict in verdicts if not verdict.works] == ["ring"]


@pytest.mark.ranks(1)
def test_a_probe_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    started = tmp_path / "started"
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(f"open({str(started)!r}, 'a').write('x')\nraise SystemExit('no driver')\n")
    verdicts = probe("cuda", program=(sys.executable, str(stand_in)))
    assert [v.works for v in verdicts] == [False] * len(OPERATIONS)
    assert "no driver" in verdicts[0].output and len(started.read_text()) <= 2
