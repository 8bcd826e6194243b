"""Topology: what the file that ``topology`` names says of ranks, alike on all of them.

Every rank reads its own copy. A file of racks gives each host its rack:
``{"racks": {"left": ["n0", "n1"], "right": ["n2", "n3"]}}``. Hosts and racks without ranks of the
job may stand there too, so that one file serves a whole cluster. A file of ``dear-train calibrate
--topology`` has measured one grid, which is taken where it predicts that to gain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dearmpi.comm.algorithms.grid_collectives import choose_grid, grid_of_places
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.grid import Grid, GridGain
from dearmpi.plan.data.fields import check_format, read_fields, read_text
from dearmpi.tune.calibration import Calibration, parse_calibration

FORMAT = 1
_MARK = "racks"
_MOST_SHOWN = 200  # characters of a file in an error


def measured_grid(world: World, config: EngineConfig) -> Grid:
    """The grid of ``config.topology``, whatever it gains (collective).

    Raises ConfigError as ``settle_topology`` does, and where it is flat.
    """
    grid = choose_grid(world, settle_topology(world, config)[0])
    if grid is None:
        hosts = len(set(world.hosts))
        raise ConfigError(
            f"topology {config.topology!r} is flat here, with {world.size} ranks on {hosts} "
            "host(s): there are no dimensions to measure; give sizes such as 2x2, or leave it out",
            code="topology-misfit",
        )
    return grid


Topology = Mapping[str, str] | Calibration
"""By host, its rack; or what was measured of a grid."""


def settle_topology(
    world: World, config: EngineConfig, *, num_bytes: int | None = None
) -> tuple[EngineConfig, str]:
    """``config`` with what its topology's file says in the place of the file's name (collective).

    num_bytes: of a bucket, for which the grid of a calibration must gain; None: it need not gain.
    Also returns what a calibration predicts of that, in words; empty without one.
    Raises ConfigError on all ranks for a file that a rank cannot read or that lacks hosts, and for
    sizes that do not fit; MismatchError for files that differ.
    """
    if config.topology_file is None:
        if config.grid_sizes:
            choose_grid(world, config)
        return config, ""
    found, path = _read_alike(world, config.topology_file), config.topology_file
    if isinstance(found, Calibration):
        return _settle_calibrated(world, found, config, num_bytes)
    missing = [rank for rank, host in enumerate(world.hosts) if host not in found]
    if missing:
        raise ConfigError(
            f"rank {missing[0]} is on {world.hosts[missing[0]]}, which is in no rack of {path}, as "
            f"{len(missing)} of {world.size} ranks are; add the host to its rack",
            code="topology-misfit",
        )
    places = [(found[host], host) for host in world.hosts]
    grid_found = grid_of_places(world, config.topology, places)
    return replace(config, topology="flat" if grid_found is None else grid_found.text), ""


def _settle_calibrated(
    world: World, found: Calibration, config: EngineConfig, num_bytes: int | None
) -> tuple[EngineConfig, str]:
    """With the topology that was measured, or flat where it does not gain as much as counts.

    With its rates where the orders of Themis gain as much again.
    """
    path = config.topology
    if found.grid is None:
        raise ConfigError(
            f"{path} was measured without a topology; give one of dear-train calibrate --topology",
            code="topology-misfit",
        )
    if _pattern(found.hosts) != _pattern(world.hosts):
        raise ConfigError(
            f"{path} was measured with {found.world_size} ranks on {len(set(found.hosts))} hosts, "
            f"and the job has {world.size} on {len(set(world.hosts))}, or in another order; "
            "calibrate again",
            code="topology-misfit",
        )
    topology = found.grid.topology
    if num_bytes is None:
        return replace(config, topology=topology), ""
    (_, grid_s), *with_rates = (
        (name, costs.both_alone_s(num_bytes))
        for name, costs in found.grid.costs_by_topology(found.costs).items()
    )
    for name, rated_s in with_rates:
        if GridGain("predicted", num_bytes, name, rated_s, grid_s).is_enough:
            topology, grid_s = name, rated_s
    flat_s = found.costs.both_alone_s(num_bytes)
    gain = GridGain("predicted", num_bytes, topology, grid_s, flat_s)
    return replace(config, topology=topology if gain.is_enough else "flat"), str(gain)


def _pattern(hosts: Sequence[str]) -> list[int]:
    """By rank, the first one on its host: alike for any names of hosts."""
    return [hosts.index(host) for host in hosts]


def _read_alike(world: World, path: str) -> Topology:
    """What every rank has read (collective)."""
    own, problem = "", ""
    found: Topology = {}
    try:
        found = read_topology(path)
        own = describe_topology(found)
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
    return found


def read_topology(path: str) -> Topology:
    """The racks of hosts, or a calibration. Raises ConfigError for another file, and for a host in
    two racks.
    """
    text = read_text(path, mark=_MARK)
    if "reduce_scatter" in text:
        return parse_calibration(text, path)
    data = read_fields(text, path, mark=_MARK, cure="name each rack's hosts")
    check_format(data, path, current=FORMAT, default=FORMAT)
    racks, found = data.fields(_MARK), dict[str, str]()
    for rack in racks.names():
        for host in racks.texts(rack):
            if host in found:
                raise racks.problem(rack, f"holds {host}, and so does {found[host]}")
            found[host] = rack
    return found


def describe_topology(found: Topology) -> str:
    """The same text for topologies that say the same."""
    if not isinstance(found, Calibration):
        return json.dumps(found, sort_keys=True)
    digest = hashlib.sha256(found.to_json().encode()).hexdigest()[:16]
    return f"a calibration of {found.world_size} ranks (hash {digest})"
