"""Topology: what the file that ``topology`` names says of ranks, alike on all of them.

Every rank reads its own copy. A file of racks gives each host its rack:
``{"racks": {"left": ["n0", "n1"], "right": ["n2", "n3"]}}``. Hosts and racks without ranks of the
job may stand there too, so that one file serves a whole cluster. With ``"rates": [20, 10, 5]``
ranks of a host, hosts of a rack and racks have wires of their own, as fast as that. A file of
``dear-train calibrate --topology`` has measured one grid, which is taken where it predicts that to
gain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dearmpi.comm.algorithms.grid_collectives import choose_grid, grid_of_places
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.grid import Grid, GridGain, relative_rates
from dearmpi.plan.data.fields import Fields, check_format, read_fields, read_text
from dearmpi.tune.calibration import Calibration, parse_calibration

FORMAT = 1
_MARK, _RATES = "racks", "rates"
_KEYS = (_MARK, _RATES, "format", "version")
_NUM_LEVELS = 3  # ranks of a host, hosts of a rack, racks
_LEAST_RATE, _MOST_RATE = 1e-6, 1e12
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


@dataclass(frozen=True, slots=True)
class Racks:
    """rack_of: by host, its rack. rates: what a rank sends to the ranks of its host, to the hosts
    of its rack, and to other racks; only their ratios count. None where all share a wire.
    """

    rack_of: Mapping[str, str]
    rates: tuple[float, ...] = ()


Topology = Racks | Calibration
"""Where hosts are; or what was measured of a grid."""


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
    racks = found.rack_of
    missing = [rank for rank, host in enumerate(world.hosts) if host not in racks]
    if missing:
        raise ConfigError(
            f"rank {missing[0]} is on {world.hosts[missing[0]]}, which is in no rack of {path}, as "
            f"{len(missing)} of {world.size} ranks are; add the host to its rack",
            code="topology-misfit",
        )
    places = [(racks[host], host) for host in world.hosts]
    grid_found = grid_of_places(world, config.topology, places, found.rates)
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
    told = f"{gain}; {found.doubt}" if found.doubt else str(gain)
    return replace(config, topology=topology if gain.is_enough else "flat"), told


def _pattern(hosts: Sequence[str]) -> list[int]:
    """By rank, the first one on its host: alike for any names of hosts."""
    return [hosts.index(host) for host in hosts]


def _read_alike(world: World, path: str) -> Topology:
    """What every rank has read (collective)."""
    own, problem = "", ""
    found: Topology = Racks({})
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
    """The racks of hosts, or a calibration. Raises ConfigError for another file, for a host in two
    racks, and for rates that are not three numbers above 0.
    """
    text = read_text(path, mark=_MARK)
    if "reduce_scatter" in text:
        return parse_calibration(text, path)
    data = read_fields(text, path, mark=_MARK, cure="name each rack's hosts")
    check_format(data, path, current=FORMAT, default=FORMAT)
    unknown = [name for name in data.names() if name not in _KEYS]
    if unknown:
        raise data.problem(unknown[0], f"is not known; a file of racks has {', '.join(_KEYS)}")
    racks, found = data.fields(_MARK), dict[str, str]()
    for rack in racks.names():
        for host in racks.texts(rack):
            if not host.strip():
                raise racks.problem(rack, "holds a host without a name")
            if host in found:
                raise racks.problem(rack, f"holds {host}, and so does {found[host]}")
            found[host] = rack
    return Racks(found, _read_rates(data))


def _read_rates(data: Fields) -> tuple[float, ...]:
    """In units of the slowest; none where the file has none."""
    if _RATES not in data:
        return ()
    given = list(data.numbers(_RATES))
    if len(given) != _NUM_LEVELS or not all(_LEAST_RATE <= rate <= _MOST_RATE for rate in given):
        raise data.problem(
            _RATES,
            f"is {given}; give {_NUM_LEVELS} numbers from {_LEAST_RATE:g} to {_MOST_RATE:g}: what "
            "a rank sends to the ranks of its host, the hosts of its rack, and other racks",
        )
    return relative_rates([1 / rate for rate in given])


def describe_topology(found: Topology) -> str:
    """The same text for topologies that say the same."""
    if not isinstance(found, Calibration):
        rates = f" with rates {'x'.join(map(str, found.rates))}" if found.rates else ""
        return json.dumps(found.rack_of, sort_keys=True) + rates
    digest = hashlib.sha256(found.to_json().encode()).hexdigest()[:16]
    return f"a calibration of {found.world_size} ranks (hash {digest})"
