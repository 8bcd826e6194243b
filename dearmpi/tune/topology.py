"""Topology: what the file that ``topology`` names says of ranks, alike on all of them.

Every rank reads its own copy. A file of racks gives each host its rack:
``{"racks": {"left": ["n0", "n1"], "right": ["n2", "n3"]}}``. Hosts and racks without ranks of the
job may stand there too, so that one file serves a whole cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from dearmpi.comm.algorithms.grid_collectives import choose_grid, grid_of_places
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.fields import check_format, read_fields, read_text

FORMAT = 1
_MARK = "racks"
_MOST_SHOWN = 200  # characters of a file in an error


def settle_topology(world: World, config: EngineConfig) -> EngineConfig:
    """``config`` with what its topology's file says in the place of the file's name (collective).

    Raises ConfigError on all ranks for a file that a rank cannot read, for hosts that it does not
    name, and for sizes that do not fit; MismatchError for files that differ.
    """
    if config.topology_file is None:
        if config.grid_sizes:
            choose_grid(world, config)
        return config
    racks = _read_alike(world, config.topology_file)
    missing = [rank for rank, host in enumerate(world.hosts) if host not in racks]
    if missing:
        raise ConfigError(
            f"rank {missing[0]} is on {world.hosts[missing[0]]}, which is in no rack of "
            f"{config.topology_file}, as {len(missing)} of {world.size} ranks are; add the host to "
            "its rack",
            code="topology-misfit",
        )
    places = [(racks[host], host) for host in world.hosts]
    grid = grid_of_places(world, config.topology, places)
    return replace(config, topology="flat" if grid is None else grid.text)


def _read_alike(world: World, path: str) -> Mapping[str, str]:
    """By host, its rack, as every rank has read it (collective)."""
    own, problem = "", ""
    try:
        own = json.dumps(read_racks(path), sort_keys=True)
    except ConfigError as error:
        problem = json.dumps([str(error), error.code])
    problems = world.all_gather_text(problem)
    for rank, text in enumerate(problems):
        if text:
            what, code = json.loads(text)
            raise ConfigError(f"rank {rank} on {world.hosts[rank]}: {what}", code=code)
    seen = world.all_gather_text(own)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise MismatchError(
                f"rank {rank} on {world.hosts[rank]} reads another topology in {path} than rank 0 "
                f"on {world.hosts[0]}: {other[:_MOST_SHOWN]} where rank 0 has "
                f"{seen[0][:_MOST_SHOWN]}; give every rank the same file",
                code="ranks-differ-in-topology",
            )
    found: dict[str, str] = json.loads(own)
    return found


def read_racks(path: str) -> dict[str, str]:
    """By host, its rack. Raises ConfigError for another file, and for a host in two racks."""
    data = read_fields(read_text(path, mark=_MARK), path, mark=_MARK, cure="name each rack's hosts")
    check_format(data, path, current=FORMAT, default=FORMAT)
    racks, found = data.fields(_MARK), dict[str, str]()
    for rack in racks.names():
        for host in racks.texts(rack):
            if host in found:
                raise racks.problem(rack, f"holds {host}, and so does {found[host]}")
            found[host] = rack
    return found
