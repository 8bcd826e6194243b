"""Files of hosts and racks: every rank makes the same grid of them, or the same error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

from dearmpi import DistributedOptimizer
from dearmpi.comm.algorithms.grid_collectives import choose_grid
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.grid import Grid
from dearmpi.tune.calibration import DimensionTimes, GridTimes, SizeTimes
from dearmpi.tune.topology import settle_topology
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.tune.test_calibration import BETA, exact, made

RACKS = {"left": ["a", "c"], "right": ["b", "d"], "dark": ["e"]}


def written(path: Path, racks: dict[str, Any] = RACKS, **more: Any) -> str:
    path.write_text(json.dumps({"racks": racks, **more}))
    return str(path)


def settled(path: str, hosts: Sequence[str]) -> Grid | None:
    """The grid of the file, which all ranks choose from what it is settled as."""

    def body(world: World) -> Grid | None:
        config, _ = settle_topology(world, EngineConfig(topology=path))
        assert config.topology_file is None
        return choose_grid(world, config)

    first, *others = run_ranks(len(hosts), body, hub=FakeHub(len(hosts), hosts=list(hosts)))
    assert others == [first] * len(others)
    return first


def test_hosts_of_a_rack_are_neighbours(tmp_path: Path) -> None:
    """Whatever the order of ranks: in a is rank 1, in its rack c, in the other one b and d."""
    path = written(tmp_path / "racks.json")
    assert settled(path, "abcd") == Grid((2, 2), (0, 2, 1, 3))
    assert settled(path, "dacbdacb") == Grid((2, 2, 2), (0, 4, 3, 7, 1, 5, 2, 6))
    assert settled(path, "aabb") == Grid((2, 2), (0, 1, 2, 3))  # one host of each rack
    assert settled(path, "aacc") == Grid((2, 2), (0, 1, 2, 3))  # one rack
    assert settled(path, "ac") is None and settled(path, "a") is None


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("dacbdacb", Grid((2, 2, 2), (0, 4, 3, 7, 1, 5, 2, 6), rates=(8.0, 4.0, 1.0))),
        ("abcd", Grid((2, 2), (0, 2, 1, 3), rates=(4.0, 1.0))),  # one rank on each host
        ("aacc", Grid((2, 2), (0, 1, 2, 3), rates=(8.0, 4.0))),  # one rack
        ("aabb", Grid((2, 2), (0, 1, 2, 3), rates=(8.0, 1.0))),  # one host of each rack
    ],
)
def test_rates_of_a_file_are_those_of_the_levels_that_there_are(
    hosts: str, expected: Grid, tmp_path: Path
) -> None:
    """In units of the slowest."""
    assert settled(written(tmp_path / "racks.json", rates=[2e9, 1e9, 2.5e8]), hosts) == expected


def test_files_with_other_rates_differ(tmp_path: Path) -> None:
    def body(world: World) -> None:
        path = written(tmp_path / f"{world.rank}.json", rates=[4, 2, 1 + world.rank])
        settle_topology(world, EngineConfig(topology=path))

    told = ("rank 1 on b", "rates 2.0x1.0x1.0", "rates 4.0x2.0x1.0")
    with raises(MismatchError, "ranks-differ-in-topology", *told):
        run_ranks(2, body, hub=FakeHub(2, hosts=["a", "b"]))


@pytest.mark.parametrize(
    ("hosts", "told"),
    [("aacb", "hosts have from 1 to 2 ranks"), ("abc", "racks have from 1 to 2 hosts")],
)
def test_racks_that_differ_are_flat_with_a_line_that_says_why(
    hosts: str, told: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=told) as warned:
        assert settled(written(tmp_path / "racks.json"), hosts) is None
    assert len(warned) == 1  # of rank 0


def test_files_that_differ_are_refused_with_both(tmp_path: Path) -> None:
    """Before anything is built; another order of the same says the same."""
    hosts, other = "abcd", {**RACKS, "left": ["a"], "right": ["b", "d", "c"]}

    def body(world: World, racks: dict[str, Any]) -> None:
        folder = tmp_path / str(world.rank)
        folder.mkdir(exist_ok=True)
        path = written(folder / "racks.json", racks if world.rank == 2 else RACKS)
        model = nn.Linear(4, 4)
        DistributedOptimizer(
            optim.SGD(model.parameters()), model, world=world, topology=path
        ).close()

    same = dict(reversed(RACKS.items()))
    run_ranks(4, lambda world: body(world, same), hub=FakeHub(4, hosts=list(hosts)))
    told = ("rank 2 on c", "rank 0 on a", '"c": "right"', '"c": "left"')
    with raises(MismatchError, "ranks-differ-in-topology", *told):
        run_ranks(4, lambda world: body(world, other), hub=FakeHub(4, hosts=list(hosts)))


@pytest.mark.parametrize("with_file", [0, 1])
def test_a_file_that_some_ranks_alone_are_given_is_refused(with_file: int, tmp_path: Path) -> None:
    """Before anything is read, so that all ranks compare the same."""
    path = written(tmp_path / "racks.json")

    def body(world: World) -> None:
        model = nn.Linear(4, 4)
        topology = path if world.rank == with_file else "flat"
        DistributedOptimizer(optim.SGD(model.parameters()), model, world=world, topology=topology)

    with raises(MismatchError, "ranks-differ-in-topology", "rank 1 on b", "rank 0 on a", "flat"):
        run_ranks(2, body, hub=FakeHub(2, hosts=["a", "b"]))


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ('{"racks": {"left": ["a"], "right": ["a", "b"]}}', "malformed-file", "left"),
        ('{"racks": {"left": "a"}}', "malformed-file", "a list"),
        ('{"racks": ["a", "b"]}', "malformed-file", "braces"),
        ('{"racks": {"left": ["a"]}, "rates": 3}', "malformed-file", "a list"),
        ('{"racks": {"left": ["a"]}, "rates": [3, 1]}', "malformed-file", "[3.0, 1.0]"),
        ('{"racks": {"left": ["a"]}, "rates": [3, 1, 0]}', "malformed-file", "from 1e-06"),
        ('{"racks": {"left": ["a"]}, "rates": [3, 1, "1"]}', "malformed-file", "holds '1'"),
        ('{"racks": {"left": ["a"]}, "rate": [3, 1, 1]}', "malformed-file", "rate is not known"),
        ('{"racks": {"left": ["a"], "left": ["b"]}}', "malformed-file", "'left' twice"),
        ('{"racks": {"left": ["a"]}, "racks": {}}', "malformed-file", "'racks' twice"),
        ('{"racks": {"left": ["a", " "]}}', "malformed-file", "a host without a name"),
        ('{"racks": {"left": ["a"]}, "rates": [NaN, 1, 1]}', "malformed-file", "finite"),
        ('{"racks": {"left": ["a"]}, "rates": [-3, 1, 1]}', "malformed-file", "holds -3"),
        ('{"racks": {"left": ["a"', "malformed-file", "cut off"),
        ("racks: {left: [a]}", "malformed-file", "not JSON"),
        ("", "malformed-file", "not JSON"),
        ("[" * 100_000, "malformed-file", "recursion"),
        ('{"hosts": ["a", "b"]}', "file-of-other-kind", "racks"),
        ('{"format": 2, "racks": {}}', "other-format-version", "2"),
        ('{"racks": {"left": ["a"]}}', "topology-misfit", "rank 1 is on b"),
        (None, "unreadable-file", "No such file"),
    ],
)
def test_what_is_no_topology_is_refused_on_all_ranks(
    text: str | None, code: str, told: str, tmp_path: Path
) -> None:
    def body(world: World) -> str:
        path = tmp_path / f"{world.rank}.json"
        path.write_text('{"racks": {"left": ["a"]}}')
        if world.rank == 1 or code == "topology-misfit":
            path.unlink() if text is None else path.write_text(text)
        with raises(ConfigError, code, told, "rank 1"):
            settle_topology(world, EngineConfig(topology=str(path)))
        return world.all_gather_text("goes on")[1]  # no rank has left the others

    assert run_ranks(2, body, hub=FakeHub(2, hosts=["a", "b"])) == ["goes on"] * 2


def calibrated(path: Path, *, grid_beta: float, hidden: float = 1.0, **changes: Any) -> str:
    """A file of 2 x 2 ranks, flat at 8 ns per byte."""
    dimension = DimensionTimes(2, exact(0.0, grid_beta), exact(0.0, grid_beta))
    grid = GridTimes("2x2", (dimension, dimension), hidden)
    hosts = ("n5", "n5", "n7", "n7")
    path.write_text(
        replace(made(hosts=hosts, grid=grid, all_gather=exact(0.0, BETA)), **changes).to_json()
    )
    return str(path)


@pytest.mark.parametrize(
    ("grid_beta", "hidden", "part", "expected"),
    [
        (5e-9, 0.0, 1.5, "2x2"),  # over one wire nothing is left to even out
        (8e-9, 0.0, 1.5, "flat"),
        (8e-9, 1.0, 0.9375, "2x2/1x1"),  # 3/4 in each, and one chunk of four in the other
        (9e-9, 1.0, 0.9375, "flat"),
    ],
)
def test_a_grid_is_taken_where_its_calibration_predicts_that_it_gains(
    grid_beta: float, hidden: float, part: float, expected: str, tmp_path: Path
) -> None:
    """A bucket of 4 MB, and ``part`` of its bytes at the pace of a dimension."""
    path = calibrated(tmp_path / "link.json", grid_beta=grid_beta, hidden=hidden)

    def body(world: World, num_bytes: int | None) -> tuple[str, str]:
        config, gain = settle_topology(world, EngineConfig(topology=path), num_bytes=num_bytes)
        return config.topology, gain

    told = f"predicted: both operations on 4 MB take {8e9 * part * grid_beta:.4g} ms by 2x2"
    hub = FakeHub(4, hosts=list("aabb"))
    for topology, gain in run_ranks(4, lambda world: body(world, 4_000_000), hub=hub):
        assert topology == expected and gain.startswith(told)
        assert gain.endswith(" and 65 ms flat")
    hub = FakeHub(4, hosts=list("aabb"))
    assert run_ranks(4, lambda world: body(world, None), hub=hub) == [("2x2", "")] * 4


@pytest.mark.parametrize("where", ["flat", "dimension"])
def test_a_choice_by_times_that_no_line_fits_says_so(where: str, tmp_path: Path) -> None:
    """Times that fall as sizes grow, of either."""
    noisy = tuple(SizeTimes(2**n, 2.0**-n, 2.0**-n) for n in (14, 17, 20))
    good = DimensionTimes(2, exact(0.0, 1e-9), exact(0.0, 1e-9))
    bad = DimensionTimes(2, exact(0.0, 1e-9), noisy)
    grid = GridTimes("2x2", (good, bad if where == "dimension" else good), 1.0)
    changes: dict[str, Any] = {"grid": grid}
    if where == "flat":
        changes["reduce_scatter"] = noisy
    path = calibrated(tmp_path / "link.json", grid_beta=1e-9, **changes)

    def body(world: World) -> str:
        return settle_topology(world, EngineConfig(topology=path), num_bytes=4_000_000)[1]

    for told in run_ranks(4, body, hub=FakeHub(4, hosts=list("aabb"))):
        assert "off their line: calibrate again" in told


@pytest.mark.parametrize(
    ("hosts", "changes", "told"),
    [
        ("abab", {}, "4 on 2"),
        ("aabbcc", {}, "6 on 3"),
        ("aabb", {"grid": None}, "without a topology"),
    ],
)
def test_a_calibration_of_another_job_is_refused(
    hosts: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = calibrated(tmp_path / "link.json", grid_beta=6e-9, **changes)
    with raises(ConfigError, "topology-misfit", told):
        settled(path, hosts)
