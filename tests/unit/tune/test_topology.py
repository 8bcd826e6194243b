"""Files of hosts and racks: every rank makes the same grid of them, or the same error."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from dearmpi.tune.topology import settle_topology
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

RACKS = {"left": ["a", "c"], "right": ["b", "d"], "dark": ["e"]}


def written(path: Path, racks: dict[str, Any] = RACKS) -> str:
    path.write_text(json.dumps({"racks": racks}))
    return str(path)


def settled(path: str, hosts: Sequence[str]) -> Grid | None:
    """The grid of the file, which all ranks choose from what it is settled as."""

    def body(world: World) -> Grid | None:
        config = settle_topology(world, EngineConfig(topology=path))
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


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ('{"racks": {"left": ["a"], "right": ["a", "b"]}}', "malformed-file", "left"),
        ('{"racks": {"left": "a"}}', "malformed-file", "a list"),
        ('{"racks": ["a", "b"]}', "malformed-file", "braces"),
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
