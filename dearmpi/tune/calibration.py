"""Calibration: what the collectives of one job cost, as measured, and where that was.

Imports no torch, so that costs can be read where nothing is trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.errors import ConfigError
from dearmpi.grid import grid_text, relative_rates
from dearmpi.plan.data.fields import Fields, check_format, errors_name, read_fields, read_text
from dearmpi.plan.model.codec_cost import CodecCost, require_known_bytes
from dearmpi.plan.model.cost import Costs, LinkFit, fit_link
from dearmpi.plan.model.network import Levels
from dearmpi.version import __version__

FORMAT = 1
_SAME_FIT = 1e-6  # which another machine's arithmetic stays far below
_LARGEST_ERROR = 0.2  # of a fit; on a quiet machine it is a few hundredths


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """An operation on a buffer of ``nbytes``, in seconds: the least of the slowest rank's times.

    alone_s: of each of several, one after the other. pair_s: of every two of several with two in
        flight.
    """

    nbytes: int
    alone_s: float
    pair_s: float


@dataclass(frozen=True, slots=True)
class DimensionTimes:
    """Times of both operations among the ranks that meet in a dimension; of the slowest of them."""

    num_ranks: int
    reduce_scatter: tuple[SizeTimes, ...]
    all_gather: tuple[SizeTimes, ...]

    @property
    def costs(self) -> Costs:
        fits = fit_sizes(self.reduce_scatter), fit_sizes(self.all_gather)
        return Costs(self.num_ranks, fits[0].link, fits[1].link)


@dataclass(frozen=True, slots=True)
class GridTimes:
    """topology: the ranks' grid, as the setting has it. dimensions: from inner to outer. hidden: as
    in ``Levels``, of all dimensions at work at once.
    """

    topology: str
    dimensions: tuple[DimensionTimes, ...]
    hidden: float

    @property
    def levels(self) -> Levels:
        """What the dimensions cost."""
        return Levels(tuple(one.costs for one in self.dimensions), self.hidden)

    @property
    def fits(self) -> list[LinkFit]:
        """Of both operations in each dimension."""
        both = [(one.reduce_scatter, one.all_gather) for one in self.dimensions]
        return [fit_sizes(times) for pair in both for times in pair]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks in each dimension, from inner to outer."""
        return tuple(one.num_ranks for one in self.dimensions)

    @property
    def rates(self) -> tuple[float, ...]:
        """What a rank sends in each dimension, in units of the slowest one."""
        slopes = []
        for one in self.dimensions:
            both = one.costs.reduce_scatter.beta_s_per_byte + one.costs.all_gather.beta_s_per_byte
            slopes.append(both * one.num_ranks / (one.num_ranks - 1))
        return relative_rates(slopes)

    def costs_by_topology(self, flat: Costs) -> dict[str, Costs]:
        """``flat`` with both operations on the grid: as the setting has it, and where that has no
        rates also with the measured ones, by which chunks take the orders of Themis.
        """
        given = EngineConfig(topology=self.topology).grid_rates
        named = {self.topology: given}
        if not given:
            _, mark, order = self.topology.partition("@")
            named[f"{grid_text(self.sizes, self.rates)}{mark}{order}"] = self.rates
        found = {}
        for text, rates in named.items():
            reduce_scatter, all_gather = self.levels.at(self.sizes, rates)
            found[text] = replace(flat, reduce_scatter=reduce_scatter, all_gather=all_gather)
        return found


@dataclass(frozen=True, slots=True)
class Calibration:
    """Times of both operations at several sizes, and where they were measured.

    hosts: of each rank. library: the MPI library, in words. algorithm: of the reduce-scatters.
    update_s, update_s_per_byte, main_thread_s: as in ``Costs``; 0 unless measured.
    codec: what compression costs, if that was measured. ``costs`` are without it.
    grid: the dimensions of a topology, if they were measured.

    Raises ConfigError where the times are too few, or no times at all.
    """

    hosts: tuple[str, ...]
    library: str
    algorithm: ReduceScatter
    reduce_scatter: tuple[SizeTimes, ...]
    all_gather: tuple[SizeTimes, ...]
    update_s: float = 0.0
    update_s_per_byte: float = 0.0
    main_thread_s: float = 0.0
    codec: CodecCost | None = None
    grid: GridTimes | None = None
    version: str = __version__

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(ReduceScatter):
            raise ConfigError(
                f"the reduce-scatters were of the kind {self.algorithm!r}; it must be one of "
                f"{', '.join(get_args(ReduceScatter))}",
                code="unknown-choice",
            )
        _ = self.costs, self.grid_costs  # the fits look at every time

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def fits(self) -> tuple[LinkFit, LinkFit]:
        """Of the reduce-scatter, and of the all-gather."""
        return fit_sizes(self.reduce_scatter), fit_sizes(self.all_gather)

    @property
    def doubt(self) -> str:
        """What is to be said of a choice by these times, a grid's included; empty for nothing."""
        fits = [*self.fits, *(self.grid.fits if self.grid is not None else ())]
        largest = max(fit.relative_error for fit in fits)
        if largest <= _LARGEST_ERROR:
            return ""
        return f"times are up to {largest:.0%} off their line: calibrate again on an idle machine"

    @property
    def flaw(self) -> str | None:
        """Why no plan can be made of these times; None if one can."""
        largest = max(fit.relative_error for fit in self.fits)
        if largest <= _LARGEST_ERROR:
            return None
        return (
            f"a plan cannot be made of times that a line fits so badly (+-{largest:.0%}, at most "
            f"{_LARGEST_ERROR:.0%}): something else has used the machine or the network meanwhile; "
            "wait until it is idle, or give more --seconds, and measure again"
        )

    @property
    def costs(self) -> Costs:
        reduce_scatter, all_gather = self.fits
        return Costs(
            self.world_size,
            reduce_scatter.link,
            all_gather.link,
            update_s=self.update_s,
            update_s_per_byte=self.update_s_per_byte,
            main_thread_s=self.main_thread_s,
            algorithm=self.algorithm,
        )

    @property
    def grid_costs(self) -> Costs | None:
        """On the grid as the setting has it; None where it was not measured."""
        if self.grid is None:
            return None
        return self.grid.costs_by_topology(self.costs)[self.grid.topology]

    def codec_for(self, config: EngineConfig, place: str) -> CodecCost | None:
        """What the compression of ``config`` costs; None for none.

        Raises ConfigError, which names ``place``, where it was not measured.
        """
        if config.compress == "none":
            return None
        require_known_bytes(config.compress)
        found, density = self.codec, config.sent_density
        if found is not None and (found.compress, found.density) == (config.compress, density):
            return found
        flags = f"--compress {config.compress}"
        flags += "" if density is None else f" --density {density:g}"
        measured = "none" if found is None else found.about
        raise ConfigError(
            f"{place} has what compress {measured} costs, and not {flags}; measure with "
            f"dear-train calibrate {flags}",
            code="setting-missing",
        )

    def to_json(self) -> str:
        """The whole, with what was fitted for people to read."""
        plain = {"format": FORMAT, "world_size": self.world_size, **asdict(self)}
        codec, grid = plain.pop("codec"), plain.pop("grid")
        if grid is not None:
            plain["grid"] = grid
        if codec is not None:
            plain["codec"] = {key: value for key, value in codec.items() if value is not None}
        for key, fit in zip(("reduce_scatter", "all_gather"), self.fits, strict=True):
            samples = plain[key]
            plain[key] = {
                **asdict(fit.link),
                "relative_error": fit.relative_error,
                "samples": samples,
            }
        return json.dumps(plain, indent=1) + "\n"


def parse_calibration(text: str, place: str) -> Calibration:
    """What ``Calibration.to_json`` wrote; ``place`` names it in errors.

    The fits are made anew from the samples. Raises ConfigError for a field that is missing or
    wrong, for samples too few to fit, and where the file has other fits.
    """
    cure = "measure the link again with dear-train calibrate"
    data = read_fields(text, place, mark="reduce_scatter", cure=cure)
    check_format(data, place, current=FORMAT, default=None)
    hosts = data.texts("hosts")
    if data.integer("world_size", least=2) != len(hosts):
        raise data.problem(
            "hosts", f"has {len(hosts)} names for {data.integer('world_size')} ranks"
        )
    algorithm: Any = data.text("algorithm")
    with errors_name(place):
        found = Calibration(
            hosts,
            data.text("library"),
            algorithm,
            _parse_samples(data.fields("reduce_scatter")),
            _parse_samples(data.fields("all_gather")),
            update_s=data.number("update_s", 0.0),
            update_s_per_byte=data.number("update_s_per_byte", 0.0),
            main_thread_s=data.number("main_thread_s", 0.0),
            codec=_parse_codec(data) if "codec" in data else None,
            grid=_parse_grid(data.fields("grid")) if "grid" in data else None,
            version=data.text("version"),
        )
    for key, fit in zip(("reduce_scatter", "all_gather"), found.fits, strict=True):
        _check_fit(data.fields(key), fit)
    return found


def _check_fit(data: Fields, fit: LinkFit) -> None:
    """Raise ConfigError where the file names a fit that its samples do not give, as after an edit
    by hand, which would otherwise change nothing.
    """
    for key, fitted in {**asdict(fit.link), "relative_error": fit.relative_error}.items():
        written = data.number(key, fitted)
        if not math.isclose(written, fitted, rel_tol=_SAME_FIT, abs_tol=1e-15):
            raise data.problem(
                key,
                f"is {written:g}, but its samples give {fitted:g}, and they are what counts; edit "
                "the samples and leave this out, or give --network alpha,beta to dear-train "
                "simulate",
            )


def read_calibration(path: str | Path) -> Calibration:
    """The calibration in the file at ``path``. Raises ConfigError if it is none."""
    return parse_calibration(read_text(path, mark="reduce_scatter"), str(path))


def _parse_codec(data: Fields) -> CodecCost:
    codec = data.fields("codec")
    return CodecCost(
        codec.text("compress"),
        codec.number("reduced"),
        codec.number("gathered"),
        codec.number("reduce_s_per_byte"),
        codec.number("gather_s_per_byte"),
        density=codec.number("density") if "density" in codec else None,
    )


def _parse_grid(data: Fields) -> GridTimes:
    dimensions = tuple(
        DimensionTimes(
            one.integer("num_ranks", least=2),
            _parse_samples(one, "reduce_scatter"),
            _parse_samples(one, "all_gather"),
        )
        for one in data.each("dimensions")
    )
    found = GridTimes(data.text("topology"), dimensions, min(1.0, data.number("hidden")))
    if EngineConfig(topology=found.topology).grid_sizes != found.sizes:
        raise data.problem(
            "topology", f"is {found.topology}, but dimensions have {grid_text(found.sizes)} ranks"
        )
    return found


def _parse_samples(data: Fields, key: str = "samples") -> tuple[SizeTimes, ...]:
    return tuple(
        SizeTimes(
            sample.integer("nbytes", least=1), sample.number("alone_s"), sample.number("pair_s")
        )
        for sample in data.each(key)
    )


def fit_sizes(samples: Sequence[SizeTimes]) -> LinkFit:
    """The alpha-beta model of an operation measured at several sizes."""
    return fit_link(
        [(sample.nbytes, sample.alone_s) for sample in samples],
        pairs=[(sample.nbytes, sample.pair_s) for sample in samples],
    )
