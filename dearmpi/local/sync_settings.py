"""Settings: what local steps go by, checked on each rank and against the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

import torch
from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import MIB, Compress, EngineConfig
from dearmpi.engine.sync.batch_norm import SyncBatchNorm
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.layout import fuse_by_cap, spec_of
from dearmpi.plan.data.local_schedule import LocalSchedule, check_count, deal_runs

_MOST_FRAGMENTS, _MOST_DELAY = 8, 5


def check_schedule(
    sync_every: int, fragments: int | None, delay: int | None, *, sync_after: int
) -> None:
    """Raise ConfigError for numbers of steps out of range, on one rank as well. None: to be chosen
    later, so that it contradicts nothing.
    """
    LocalSchedule(sync_every, 1 if fragments is None else fragments, 0 if delay is None else delay)
    check_count("sync_after", sync_after, 0)


def check_outer(lr: float, momentum: float) -> None:
    """Raise ConfigError for numbers out of range."""
    _check_number("outer_lr", lr)
    _check_number("outer_momentum", momentum)
    if not 0 < lr < math.inf:
        raise ConfigError(f"outer_lr is {lr}; it must be above 0", code="out-of-range")
    if not 0 <= momentum < 1:
        raise ConfigError(
            f"outer_momentum is {momentum}; it must be at least 0 and below 1", code="out-of-range"
        )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give a number", code="wrong-type"
        )


def check_mix(mix: float, delay: int) -> float:
    """``mix``, which has no meaning without ``delay``. Raises ConfigError for another one."""
    _check_number("mix", mix)
    if not 0 <= mix < 1:
        raise ConfigError(f"mix is {mix}; it must be at least 0 and below 1", code="out-of-range")
    if mix and not delay:
        raise ConfigError(
            f"mix is {mix}, but delay is 0, so that no step was taken meanwhile; leave mix out",
            code="settings-contradict",
        )
    return mix


def choose_config(
    config: EngineConfig | None, compress: Compress | None, inner: Optimizer
) -> EngineConfig:
    """The settings of the exchange. Raises ConfigError for those that it cannot have."""
    config = config or EngineConfig()
    if config.eager:
        raise ConfigError(
            "eager is set, but local steps exchange no gradients during backprop; leave it out",
            code="settings-contradict",
        )
    if config.buffers != "keep":
        raise ConfigError(
            f"buffers is {config.buffers!r}, but with local steps each rank keeps its own; leave "
            "it out",
            code="settings-contradict",
        )
    if compress is None:
        params = [param for group in inner.param_groups for param in group["params"]]
        on_host = all(param.device.type == "cpu" for param in params)
        plain = config == EngineConfig(bucket_cap_mb=config.bucket_cap_mb)
        compress = "int4" if on_host and plain else config.compress
    if compress == "auto":
        raise ConfigError(
            "compress is 'auto', which is chosen by what hides behind computation, but local steps "
            "exchange between computations; leave compress out, which is int4 then, or give "
            "compress 'int8'",
            code="settings-contradict",
        )
    return replace(config, compress=compress)


def refuse_synchronized(model: nn.Module) -> None:
    """Raise ConfigError for batch normalisation over all ranks, which would wait in each step."""
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            raise ConfigError(
                f"module {name or 'of the model'} is a SyncBatchNorm, which exchanges in each "
                "forward, but with local steps ranks train alone between exchanges; use ordinary "
                "batch normalisation",
                code="module-not-served",
            )


def with_buckets(
    config: EngineConfig,
    fragments: int | None,
    trained: Mapping[str, nn.Parameter],
    world_size: int,
) -> tuple[EngineConfig, int]:
    """With a smaller bucket cap, if none is given and ``fragments`` need more buckets; the number
    of buckets of what ranks share.

    trained: by name. Raises ConfigError for more fragments than buckets.
    """
    specs = [
        spec_of(
            nn.Parameter(torch.empty_like(param, dtype=shared_dtype(param), device="meta")), name
        )
        for name, param in trained.items()
    ]
    nbytes = sum(spec.nbytes for spec in specs)
    cap_bytes = config.cap_bytes(nbytes, world_size=world_size)
    least = max(1, nbytes // (2 * (fragments or 1)))  # a bucket exceeds the cap at times
    if fragments is not None and config.bucket_cap_mb is None and cap_bytes > least:
        config, cap_bytes = replace(config, bucket_cap_mb=least / MIB), least
    buckets = fuse_by_cap(specs, cap_bytes)
    if fragments is not None:
        deal_runs([sum(spec.nbytes for spec in bucket) for bucket in buckets], fragments)
    return config, len(buckets)


def choose_schedule(
    sync_every: int, fragments: int | None, delay: int | None, num_buckets: int
) -> LocalSchedule:
    """As given, and else as many fragments and steps as ``sync_every`` and the buckets allow."""
    if fragments is None:
        fragments = max(1, min(_MOST_FRAGMENTS, sync_every // (1 + (delay or 0)), num_buckets))
    if delay is None:
        delay = min(_MOST_DELAY, LocalSchedule.most_delay(sync_every, fragments))
    return LocalSchedule(sync_every, fragments, delay)


def shared_dtype(param: nn.Parameter) -> torch.dtype:
    """What ranks share of ``param`` is in fp32 at least, since deltas are smaller than values."""
    return torch.promote_types(param.dtype, torch.float32)


def compare_ranks(world: World, own: str, *, code: str = "ranks-built-differently") -> None:
    """Raise MismatchError unless ``own`` is the same on all ranks (collective)."""
    seen = world.all_gather_text(own)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise MismatchError(
                f"rank {rank} has {other}, but rank 0 has {seen[0]}; give every rank the same",
                code=code,
            )
