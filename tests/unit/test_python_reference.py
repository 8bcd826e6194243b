"""docs/reference/python.md and classes.md name all that a script can use."""

from __future__ import annotations

from pathlib import Path

import dearmpi
from dearmpi import World
from dearmpi.comm.backends.alone import AloneCollectives

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "python.md").read_text() + (REFERENCE / "classes.md").read_text()


def is_told(name: str) -> bool:
    return f"`{name}`" in PAGE or f"`{name}(" in PAGE


def test_all_of_the_package_is_in_the_reference() -> None:
    assert [name for name in dearmpi.__all__ if not is_told(name)] == []


def test_all_of_the_world_is_in_the_reference() -> None:
    world = World(AloneCollectives(), progress="poll")
    names = {name for name in {*dir(World), *vars(world)} if not name.startswith("_")}
    assert len(names) > 20
    assert sorted(name for name in names if not is_told(name)) == []
