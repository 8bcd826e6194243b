"""Settings of the engine: one frozen dataclass, validated where it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, prod
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, get_args

from dearmpi.errors import ConfigError

ScheduleName = Literal["serial", "wfbp", "dear"]
Gather = Literal["parameters", "gradients"]
Shards = Literal["auto", "even", "whole"]
ReduceScatter = Literal["native", "ring", "exchange"]
Buffers = Literal["keep", "broadcast", "average"]
WireDtype = Literal["bf16", "fp16"]
CommDtype = Literal["fp32", "bf16", "fp16"]
Compress = Literal[
    "none",
    "int8",
    "int4",
    "nonzero",
    "random-block",
    "random-k",
    "topk",
    "block-topk",
    "powersgd",
    "sketch",
    "auto",
]
Feedback = Literal["ef14", "ef21", "none"]
Scope = Literal["bucket", "parameter", "model"]
Coordinates = Literal["shared", "own"]
CudaBuffers = Literal["auto", "staged", "direct"]
UpdateOn = Literal["device", "host"]
ProgressMode = Literal["thread", "poll"]

ADDED_BY_LIBRARY: frozenset[ReduceScatter] = frozenset({"native"})
"""Algorithms by which the MPI library forms the sums; it cannot in half precision."""

MIB = 1024 * 1024
SPARSE = ("random-block", "random-k", "topk", "block-topk")
"""Of ``compress``: what sends a part of a gradient in each step."""

DEFAULT_DENSITY = 0.01
DEFAULT_POWERSGD_RANK = 4
LEAST_COMPRESSED = 1 << 16
"""Elements of a bucket; the start-up of a message costs more than smaller ones."""

# By default a bucket's shard is no smaller: a ring sends P - 1 of them, each with its start-up.
_LEAST_SHARD_BYTES = 64 * 1024

_RATE = r"\d{1,3}(?:\.\d{1,3})?"  # of a dimension: such numbers keep their digits as text


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str):
        meant = nearest(str(value).removeprefix("torch."), choices)
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; {meant}choose one of "
            f"{', '.join(choices)}, as a text",
            code="wrong-type",
        )
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}; {nearest(value, choices)}choose one of {', '.join(choices)}",
            code="unknown-choice",
        )


# What torch and others call a choice, and its names here.
_CALLED_ELSEWHERE = {
    "gpu": ("cuda", "device"),
    "cpu": ("host",),
    "half": ("fp16",),
    "float16": ("fp16",),
    "float": ("fp32",),
    "float32": ("fp32",),
    "double": ("fp64",),
    "float64": ("fp64",),
}


def nearest(value: str, choices: Iterable[str]) -> str:
    """The question whether one of ``choices`` was meant, with a blank after it, for a message about
    ``value``. Empty where none is near.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    meant = [name for name in _CALLED_ELSEWHERE.get(value.lower(), ()) if name in by_lower]
    close = meant or get_close_matches(value.lower(), by_lower, n=1)
    return f"did you mean {by_lower[close[0]]!r}? " if close else ""


def known_names(name: str, known: Iterable[str], *, most: int = 24) -> str:
    """End of a message about an unknown ``name``: the nearest known one, and ``most`` of all."""
    told = list(known)
    if not told:
        return "; it has none"
    more = f", ... ({len(told)} in all)" if len(told) > most else ""
    return f"; {nearest(name, told)}known: {', '.join(told[:most])}{more}"


def _check_type(name: str, value: object, kind: type, what: str) -> None:
    """Raise ConfigError unless ``value`` is of ``kind``; True and False are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give {what}", code="wrong-type"
        )


_NUMBERS: Mapping[str, tuple[type, type[int] | type[float], str]] = {
    "integer": (Integral, int, "a whole number"),
    "number": (Real, float, "a number"),
}
"""By the kind of a setting: what it may be, what it becomes, and what to give."""


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """What a command line must know of a field of ``EngineConfig``.

    choices: of a ``choice``, with the default among them. least, above: bounds of a number; a value
        must be at least ``least``, and greater than ``above``.
    """

    kind: Literal["choice", "integer", "number", "switch", "text"]
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None


def _declare(default: Any, kind: Any, help: str, **details: Any) -> Any:
    """A field of ``EngineConfig``; ``details`` as those of ``EngineSetting``."""
    about = EngineSetting(kind, help, default, **details)
    return field(default=default, metadata={"setting": about})


def engine_setting(name: str) -> EngineSetting:
    """The setting ``name`` as ``EngineConfig`` declares it. Raises KeyError for no setting."""
    about: EngineSetting = EngineConfig.__dataclass_fields__[name].metadata["setting"]
    return about


CURE_BY_COMPRESS = "take compress 'int8' or 'int4'"
CURE_BY_GATHER = "with gather='gradients' for optimizers that need whole tensors"
"""Where a ``compress`` excludes owners: what to take in its place, and in theirs."""
_SERVES_ANY_SHARDS = ("none", "int8", "int4", "auto")  # of ``compress``


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How gradients are reduced and parameters gathered.

    schedule: ``serial`` (all-reduce after backprop), ``wfbp`` (all-reduce of a bucket during
        backprop) or ``dear`` (reduce-scatter during backprop, all-gather during the next
        feed-forward).
    gather: ``parameters`` (sharded update, optimizer state 1/P) or ``gradients`` (as in the
        paper: every rank updates everything).
    shards: with ``gather="parameters"``, where buckets are cut: ``even``, for optimizers that treat
        each element by itself; ``whole``: a tensor that the optimizer needs whole has one owner,
        which alone updates it and keeps its state. All others are cut so that bytes are even;
        or ``auto``: whole for optimizers that need whole tensors, such as Muon. Numbers, one for
        each rank: evenly, but a rank has as much as its number is of their sum.
    bucket_cap_mb: about so many MiB of parameters are fused into one bucket, and a parameter is
        never cut; the first layers have a sixteenth of that to themselves. None: an eighth of the
        model, but at least 1 and at most 4, and at most half of the model. Above 64 ranks the most
        is a sixteenth of their number.
    reduce_scatter: the algorithm: ``ring`` in chunks, an ``exchange`` of all shards, MPI's own
        (``native``), or ``auto`` to measure them at start.
    topology: how ranks are grouped for both operations: ``flat``, not at all; ``hosts``, first
        within hosts and then between them, which sends less between hosts of several ranks; or
        sizes such as ``2x4``, ranks in each dimension from inner to outer, those of a host first;
        ``2x2@0,2,1,3`` numbers the ranks anew. ``2x4/10x5`` gives what a rank sends in each
        dimension over a wire of its own: chunks then cross dimensions in the orders that even out
        their loads over all buckets of a backprop (Themis, arXiv 2110.04478). A ``.json`` file
        names the hosts of each rack: ``{"racks": {"left": ["n0", "n1"], "right": ["n2", "n3"]}}``,
        and perhaps ``"rates"`` of ranks of a host, hosts of a rack and racks; one of ``dear-train
        calibrate --topology`` has a measured grid, which is taken where it predicts a gain of 3 %
        or more. The sums differ from those of ``flat`` in the last bits. Where hosts have different
        numbers of ranks, or one each, ``hosts`` is ``flat``, and so is a file where hosts or racks
        differ. ``auto`` measures ``hosts`` at start, and takes it where it is faster by 3 % or
        more.
    comm_dtype: in what wider tensors are sent: ``fp32``, which sends all of them as they are, or
        ``bf16`` or ``fp16``, with half the bytes. With ``gather="parameters"`` every rank then
        keeps its shard unrounded for the optimizer; the model's parameters are rounded, those that
        no step has changed yet for good.
    compress: what large buckets of fp32 or fp64 are sent as, both ways: ``int8`` or ``int4``, with
        a scale for each 256 or 64 elements: about 4 and 7.5 times fewer bytes. Gradients are
        quantized once and added in fp32. With ``gather="parameters"`` every rank keeps its shard in
        fp32 for the optimizer, as well as what replicas show of it, and sends the difference.
        ``nonzero`` loses nothing: it sends the blocks of 64 elements that are not zero on some
        rank, or that a step has changed. ``random-block``, ``random-k``, ``topk`` (the largest
        elements, each rank its own) and ``block-topk`` (the blocks of 1024 whose sums are largest)
        are for SGD. They send ``density`` of a gradient in a step and the rest in later ones, and
        parameters as ``int8`` does. ``powersgd``, with ``gather="gradients"``, sends two factors of
        each matrix in turn, and the rest later. ``sketch`` adds up the blocks of ``nonzero`` in a
        few cells, checks what it decodes, and sends a bucket whole where that fails; rounding to 30
        bits waits. ``auto`` sends the first steps whole and measures them, the link and what codecs
        compute. Then it takes what the simulator predicts to be faster by 3 % or more, of bf16,
        ``int8`` and ``int4``, which any optimizer bears.
    density: of sparse ``compress``, the part of each shard that is sent; None: 0.01.
    error_feedback: of sparse ``compress``, what becomes of the rest: ``ef14`` adds it to the next
        gradient, ``ef21`` sends differences to an estimate, for any optimizer, ``none`` drops it;
        None: ``ef14``.
    scope: of sparse ``compress``, of what a share is sent: of each ``bucket``'s shards, or of each
        ``parameter``, so that none waits for larger ones; None: ``bucket``. Of each parameter
        ``block-topk`` sends a block at least. ``model``, of ``topk``, gives each bucket the part of
        the whole model's share that it had of the largest magnitudes in the step before.
    coordinates: of sparse ``compress``: ``shared``, all ranks send the same elements, or ``own``,
        each chooses by itself; None: ``own`` with ``topk``, else ``shared``. Shared ones of
        ``topk`` are the largest of a shard's owner.
    compress_after: so many steps send all as it is, before lossy ``compress`` begins.
    powersgd_rank: of ``compress="powersgd"``, the columns of each factor; None: 4.
    cuda_buffers: how a CUDA device's tensors get to MPI: ``staged`` by pinned host memory,
        ``direct`` by an MPI that was tried on device memory, or ``auto``: direct where that works,
        and all ranks are on one host.
    update_on: where a CUDA device's parameters are updated: on the ``device``, or on the ``host``,
        by the CPU. The optimizer's state is in host memory then. So are its own copies of the
        parameters, in fp32 where the device has bf16 or fp16.
    window: most operations of one kind in flight at once.
    eager: a bucket may be updated while backprop still runs. The caller promises that a step
        follows each synchronizing backward, and that options, such as the learning rate, are set
        before it. Between the two nothing may read or change parameters.
    master_weights: the optimizer works on fp32 copies of bf16 and fp16 parameters.
    buffers: what each step does to the model's buffers, such as batch normalisation's statistics:
        ``keep`` (every rank its own, at no cost), ``broadcast`` (rank 0's, as DDP does) or
        ``average`` (over those that train). Inside ``join`` a broadcast is from the last rank that
        still trains.
    check_every: steps between comparisons of all replicas; 0: none; None: what the environment
        variable DEAR_CHECK says. Checks also catch parameters that are read too early.
    """

    schedule: ScheduleName = _declare(
        "dear",
        "choice",
        "dear pipelines; serial and wfbp are baselines",
        choices=get_args(ScheduleName),
    )
    gather: Gather = _declare(
        "parameters",
        "choice",
        "what is gathered: parameters shards the optimizer",
        choices=get_args(Gather),
    )
    shards: Shards | Sequence[float] = _declare(
        "auto",
        "choice",
        "where buckets are cut: even, for elementwise optimizers; whole: tensors that it needs "
        "whole have one owner; auto: whole if there are any; numbers: a weight for each rank",
        choices=get_args(Shards),
    )
    bucket_cap_mb: float | None = _declare(
        None,
        "number",
        "MiB that a bucket is filled to; a larger parameter is not cut; default: an eighth of the "
        "model, from 1 to 4, above 64 ranks a sixteenth of their number, at most half of the model",
        above=0,
    )
    reduce_scatter: ReduceScatter | Literal["auto"] = _declare(
        "ring",
        "choice",
        "the algorithm; auto measures at start",
        choices=(*get_args(ReduceScatter), "auto"),
    )
    topology: str = _declare(
        "flat",
        "text",
        "flat; hosts: first within hosts, then between them; auto: hosts where that is measured "
        "to be faster; sizes such as 2x4, from inner to outer; or a .json file of racks, or of "
        "dear-train calibrate --topology",
    )
    comm_dtype: CommDtype = _declare(
        "fp32",
        "choice",
        "bf16 and fp16 send tensors of fp32 with half the bytes",
        choices=get_args(CommDtype),
    )
    compress: Compress = _declare(
        "none",
        "choice",
        "send large buckets of fp32 or fp64 in 8 or 4 bits an element, both ways; nonzero: only "
        "blocks that are not zero, or have changed; auto: bf16, int8 or int4, where the first "
        "steps show that it pays; the others: a part of a gradient in each step",
        choices=get_args(Compress),
    )
    density: float | None = _declare(
        None,
        "number",
        "with a sparse --compress: the part of a gradient that is sent in a step; default: 0.01",
        above=0,
    )
    error_feedback: Feedback | None = _declare(
        None,
        "choice",
        "with a sparse --compress: ef14 adds what was not sent to the next gradient, ef21 sends "
        "differences to an estimate, none drops it; default: ef14",
        choices=get_args(Feedback),
    )
    scope: Scope | None = _declare(
        None,
        "choice",
        "with a sparse --compress: of what a part is sent; default: bucket",
        choices=get_args(Scope),
    )
    coordinates: Coordinates | None = _declare(
        None,
        "choice",
        "with a sparse --compress: whether all ranks send the same elements, or each its own; "
        "default: own with topk, else shared",
        choices=get_args(Coordinates),
    )
    compress_after: int = _declare(
        0, "integer", "steps that send all as it is before --compress begins", least=0
    )
    powersgd_rank: int | None = _declare(
        None,
        "integer",
        "with powersgd: the columns of each factor; default: 4",
        least=1,
    )
    cuda_buffers: CudaBuffers = _declare(
        "auto",
        "choice",
        "staged: by pinned host memory; direct: by an MPI that was tried on device memory; auto: "
        "direct where that works, and all ranks are on one host",
        choices=get_args(CudaBuffers),
    )
    update_on: UpdateOn = _declare(
        "device",
        "choice",
        "with CUDA: host keeps the optimizer's state, and updates, in host memory",
        choices=get_args(UpdateOn),
    )
    window: int = _declare(2, "integer", "operations in flight of each kind", least=1)
    eager: bool = _declare(False, "switch", "update buckets while backprop still runs")
    master_weights: bool = _declare(
        False, "switch", "the optimizer works on fp32 copies of bf16 and fp16 parameters"
    )
    buffers: Buffers = _declare(
        "keep",
        "choice",
        "what each step does to the model's buffers",
        choices=get_args(Buffers),
    )
    check_every: int | None = _declare(
        None, "integer", "steps between comparisons of all replicas; 0: none", least=0
    )

    def __post_init__(self) -> None:
        self._check_types()
        for one in fields(self):
            about = engine_setting(one.name)
            if one.name == "shards" and self.has_weights:
                continue
            value = getattr(self, one.name)
            if about.kind == "choice" and (value is not None or about.default is not None):
                check_choice(one.name, value, about.choices)
        if self.reduce_scatter in ADDED_BY_LIBRARY and self.comm_dtype != "fp32":
            raise ConfigError(
                f"comm_dtype is {self.comm_dtype!r}, but reduce_scatter is "
                f"{self.reduce_scatter!r}, and MPI has no sums in half precision; use 'ring' or "
                "'exchange', or leave comm_dtype out",
                code="settings-contradict",
            )
        self._check_topology()
        self._check_compress()
        self._check_shards()
        if self.update_on == "host" and self.gather == "gradients":
            raise ConfigError(
                "update_on is 'host', but gather is 'gradients', with which every host would "
                "update all parameters; use gather 'parameters', so that each updates its shard, "
                "or leave update_on out",
                code="settings-contradict",
            )
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb <= 65536:
            raise ConfigError(
                f"bucket_cap_mb is {self.bucket_cap_mb}; it must be above 0 and at most 65536",
                code="out-of-range",
            )
        if self.check_every is not None and self.check_every < 0:
            raise ConfigError(
                f"check_every is {self.check_every}; it must be 0 or more", code="out-of-range"
            )
        if self.window < 1:
            raise ConfigError(
                f"window is {self.window}; at least 1 operation must be in flight",
                code="out-of-range",
            )

    def _check_topology(self) -> None:
        if self.topology == "flat":
            return
        is_known = self.topology in ("hosts", "auto") or self.topology_file is not None
        if not is_known and not re.fullmatch(
            rf"[1-9]\d{{0,6}}(x[1-9]\d{{0,6}})+(/{_RATE}(x{_RATE})+)?(@\d{{1,7}}(,\d{{1,7}})*)?",
            self.topology,
        ):
            raise ConfigError(
                f"topology is {self.topology!r}; "
                f"{nearest(self.topology, ('flat', 'hosts', 'auto'))}give flat, hosts, auto, the "
                "ranks in each dimension, from inner to outer, such as 2x4, or a .json file of "
                "hosts and racks",
                code="malformed-value",
            )
        rates = self.grid_rates
        if rates and (len(rates) != len(self.grid_sizes) or min(rates) <= 0):
            raise ConfigError(
                f"topology is {self.topology!r}, with {len(rates)} rates for "
                f"{len(self.grid_sizes)} dimensions; after / give one above 0 for each",
                code="malformed-value",
            )
        order = self.grid_order
        if order and sorted(order) != list(range(prod(self.grid_sizes))):
            raise ConfigError(
                f"topology is {self.topology!r}: after @ each of {prod(self.grid_sizes)} ranks "
                "must stand once",
                code="malformed-value",
            )
        for name, value, usual, why in (
            ("reduce_scatter", self.reduce_scatter, "ring", "is for ranks that are not grouped"),
            ("compress", self.compress, "none", "has no sums on a grid yet"),
        ):
            if value != usual:
                raise ConfigError(
                    f"topology is {self.topology!r}, but {name} is {value!r}, which {why}; leave "
                    "one of the two out",
                    code="settings-contradict",
                )

    @property
    def grid_sizes(self) -> tuple[int, ...]:
        """What ``topology`` says of the ranks in each dimension; none unless it has sizes."""
        if self.topology_file is not None or not self.topology[:1].isdecimal():
            return ()
        return tuple(map(int, self.topology.partition("@")[0].partition("/")[0].split("x")))

    @property
    def grid_rates(self) -> tuple[float, ...]:
        """What a rank sends in each dimension, where ``topology`` says so."""
        named = self.topology.partition("@")[0].partition("/")[2]
        if self.topology_file is not None or not named:
            return ()
        return tuple(map(float, named.split("x")))

    @property
    def grid_order(self) -> tuple[int, ...]:
        """The ranks by place, where ``topology`` says so."""
        if self.topology_file is not None or "@" not in self.topology:
            return ()
        return tuple(map(int, self.topology.partition("@")[2].split(",")))

    @property
    def topology_file(self) -> str | None:
        """The file that ``topology`` names; None if it names none."""
        return self.topology if self.topology.endswith(".json") else None

    def _check_compress(self) -> None:
        self._check_sparse()
        if self.compress_after < 0:
            raise ConfigError(
                f"compress_after is {self.compress_after}; it is a number of steps, 0 or more",
                code="out-of-range",
            )
        if self.compress_after and not self.is_lossy:
            why = "begins when it has decided" if self.compress == "auto" else "loses nothing"
            raise ConfigError(
                f"compress_after is {self.compress_after}, but compress is {self.compress!r}, "
                f"which {why}; leave compress_after out, or take compress 'int8'",
                code="setting-without-effect",
            )
        self._check_powersgd()
        if self.compress == "none":
            return
        added_here = {*get_args(ReduceScatter), "auto"} - ADDED_BY_LIBRARY
        for name, value, served, cure in (
            ("comm_dtype", self.comm_dtype, ("fp32",), "one of the two out"),
            ("reduce_scatter", self.reduce_scatter, added_here, "it out"),
            ("update_on", self.update_on, ("device",), "it out"),
        ):
            if value not in served:
                raise ConfigError(
                    f"compress is {self.compress!r}, but {name} is {value!r}, which cannot carry "
                    f"what is compressed; leave {cure}",
                    code="settings-contradict",
                )

    def _check_sparse(self) -> None:
        for name in ("density", "error_feedback", "scope", "coordinates"):
            chosen = getattr(self, name)
            if chosen is not None and not self.is_sparse:
                raise ConfigError(
                    f"{name} is {chosen!r}, but compress is {self.compress!r}, which sends all "
                    f"elements; leave {name} out, or take one of {', '.join(SPARSE)}",
                    code="setting-without-effect",
                )
        is_topk = self.compress == "topk" and self.sent_coordinates == "own"
        if self.scope == "model" and not is_topk:
            raise ConfigError(
                f"scope is 'model', but compress is {self.compress!r} with coordinates "
                f"{self.sent_coordinates!r}; the largest elements of a whole model are those of "
                "each rank's own: take compress 'topk' and leave coordinates out, or leave scope "
                "out",
                code="settings-contradict",
            )
        if self.density is not None and not 0 < self.density <= 1:
            raise ConfigError(
                f"density is {self.density}; it is a part of all elements, above 0 and at most 1",
                code="out-of-range",
            )
        if (self.is_sparse or self.compress == "sketch") and self.gather == "gradients":
            raise ConfigError(
                f"compress is {self.compress!r}, but gather is 'gradients'; what a rank has not "
                "sent has its place beside sharded parameters: take gather 'parameters'",
                code="settings-contradict",
            )

    def _check_powersgd(self) -> None:
        if self.powersgd_rank is not None and self.compress != "powersgd":
            raise ConfigError(
                f"powersgd_rank is {self.powersgd_rank}, but compress is {self.compress!r}, which "
                "has no factors; leave powersgd_rank out, or take compress 'powersgd'",
                code="setting-without-effect",
            )
        if self.powersgd_rank is not None and self.powersgd_rank < 1:
            raise ConfigError(
                f"powersgd_rank is {self.powersgd_rank}; a factor has 1 column or more",
                code="out-of-range",
            )
        if self.compress == "powersgd" and self.gather == "parameters":
            raise ConfigError(
                "compress is 'powersgd', but gather is 'parameters', which have no factors of few "
                "columns; take gather 'gradients', with which every rank updates all parameters, "
                "or compress 'int8'",
                code="settings-contradict",
            )

    def _check_shards(self) -> None:
        if self.has_weights:
            self._check_weights()
        if self.can_own_tensors or not (self.has_weights or self.shards == "whole"):
            return
        name, cure = "gather", "leave shards out, since every rank updates all parameters"
        if self.compress not in _SERVES_ANY_SHARDS:
            name, cure = "compress", f"{CURE_BY_COMPRESS}, or leave shards out, {CURE_BY_GATHER}"
        elif self.update_on == "host":
            if self.has_weights and self.gather == "parameters":
                return
            name, cure = "update_on", "leave one of the two out"
        raise ConfigError(
            f"shards is {self.shards!r}, but {name} is {getattr(self, name)!r}; {cure}",
            code="settings-contradict",
        )

    def _check_weights(self) -> None:
        weights = tuple(self.shards)
        for weight in weights:
            _check_type(
                "shards", weight, Real, "a number for each rank, or 'auto', 'even', 'whole'"
            )
        given = tuple(float(weight) for weight in weights)  # type: ignore[arg-type]
        if not all(0 <= weight < inf for weight in given) or not 0 < sum(given) < inf:
            raise ConfigError(
                f"shards is {list(given)}; give a number for each rank, none of them negative, not "
                "all of them 0, and with a finite sum",
                code="out-of-range",
            )
        object.__setattr__(self, "shards", given)

    def _check_types(self) -> None:
        for name in ("eager", "master_weights"):
            _check_type(name, getattr(self, name), bool, "True or False")
        _check_type("topology", self.topology, str, "a text such as 'hosts' or '2x4'")
        if not self.has_weights:
            names = "'auto', 'even', 'whole', or a list with a number for each rank"
            _check_type("shards", self.shards, str, names)
        for one in fields(self):
            about, value = engine_setting(one.name), getattr(self, one.name)
            if about.kind not in _NUMBERS or (value is None and about.default is None):
                continue
            kind, plain, what = _NUMBERS[about.kind]
            or_none = ", or None" if about.default is None else ""
            _check_type(one.name, value, kind, f"{what}{or_none}")
            if type(value) not in (int, float):  # files and texts show numpy's otherwise
                object.__setattr__(self, one.name, plain(value))

    @property
    def has_weights(self) -> bool:
        """Whether ``shards`` has a number for each rank."""
        return not isinstance(self.shards, str) and isinstance(self.shards, Sequence)

    @property
    def can_own_tensors(self) -> bool:
        """Whether these settings serve shards of different lengths."""
        is_served = self.compress in _SERVES_ANY_SHARDS and self.update_on == "device"
        return is_served and self.gather == "parameters"

    @property
    def is_lossy(self) -> bool:
        """Whether what is compressed loses something in a step; of ``sketch`` a rounding waits."""
        return self.compress not in ("none", "nonzero", "sketch", "auto")

    @property
    def is_sparse(self) -> bool:
        """Whether a step sends a part of the gradients."""
        return self.compress in SPARSE

    @property
    def needs_linear(self) -> bool:
        """Whether the optimizer gets parts of gradients, and sums of such."""
        return self.is_sparse and self.error_feedback != "ef21"

    @property
    def is_biased(self) -> bool:
        """Whether parts of gradients are dropped, and what is sent is not scaled to make up."""
        is_part = self.is_sparse and self.sent_density != 1.0
        return is_part and self.error_feedback == "none" and self.compress != "random-k"

    @property
    def sent_density(self) -> float | None:
        """The part of a gradient that a step sends; None where it is all of it."""
        return (self.density or DEFAULT_DENSITY) if self.is_sparse else None

    @property
    def sent_coordinates(self) -> Coordinates:
        """Whether ranks send the same elements of sparse gradients, or each its own."""
        return self.coordinates or ("own" if self.compress == "topk" else "shared")

    @property
    def has_usual_coordinates(self) -> bool:
        """Whether ``scope`` and ``coordinates`` are what their defaults mean."""
        is_own = self.compress == "topk"
        return self.scope != "parameter" and (self.sent_coordinates == "own") == is_own

    @property
    def counts_steps(self) -> bool:
        """Whether what travels depends on the number of steps taken."""
        return self.compress_after > 0 or self.error_feedback == "none"

    @property
    def keeps_unsent(self) -> bool:
        """Whether ranks keep what a step does not send, for later ones."""
        return self.is_sparse or self.compress in ("powersgd", "sketch")

    @property
    def wire_dtype(self) -> WireDtype | None:
        """In what collectives send wider tensors; None: as they are."""
        return None if self.comm_dtype == "fp32" else self.comm_dtype

    @property
    def steps_between_checks(self) -> int:
        """``check_every``, or DEAR_CHECK where there is none; 0: no checks."""
        if self.check_every is not None:
            return self.check_every
        text = os.environ.get("DEAR_CHECK", "0")
        if not text.isdigit():
            raise ConfigError(
                f"DEAR_CHECK is {text!r}; give the steps between checks, 0 for none",
                code="wrong-type",
            )
        return int(text)

    def has_buckets(self, world_size: int) -> bool:
        """Whether buckets are updated, and the wrapped optimizer does not simply do its work."""
        return world_size > 1 or self.master_weights or self.update_on == "host"

    def cap_bytes(self, model_bytes: int, *, world_size: int) -> int:
        """Bucket cap in bytes, at least one, for a model whose parameters take ``model_bytes``."""
        if self.bucket_cap_mb is not None:
            return max(1, int(self.bucket_cap_mb * MIB))
        eighth, half = -(-model_bytes // 8), -(-model_bytes // 2)
        few_ranks = min(4 * MIB, max(MIB, eighth))
        return max(1, min(max(few_ranks, world_size * _LEAST_SHARD_BYTES), half))


class EngineSettings(TypedDict, total=False):
    """The fields of ``EngineConfig`` as keywords of ``DistributedOptimizer``, for type checkers.

    A type checker reads no fields off another class; a test compares the two.
    """

    schedule: ScheduleName
    gather: Gather
    shards: Shards | Sequence[float]
    bucket_cap_mb: float | None
    reduce_scatter: ReduceScatter | Literal["auto"]
    topology: str
    comm_dtype: CommDtype
    compress: Compress
    density: float | None
    error_feedback: Feedback | None
    scope: Scope | None
    coordinates: Coordinates | None
    compress_after: int
    powersgd_rank: int | None
    cuda_buffers: CudaBuffers
    update_on: UpdateOn
    window: int
    eager: bool
    master_weights: bool
    buffers: Buffers
    check_every: int | None
