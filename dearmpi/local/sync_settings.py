"""Settings: what local steps go by, checked on each rank and against the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from numbers import Real

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import MIB, Compress, EngineConfig
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.local_schedule import check_count


def check_numbers(sync_every: int, sync_after: int, lr: float, momentum: float) -> None:
    """Raise ConfigError for numbers out of range."""
    check_count("sync_every", sync_every, 1)
    check_count("sync_after", sync_after, 0)
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


def with_buckets(
    config: EngineConfig,
    fragments: int | None,
    params: Iterable[nn.Parameter],
    world_size: int,
) -> EngineConfig:
    """With a smaller bucket cap, if none is given and ``fragments`` need more buckets."""
    if fragments is None or config.bucket_cap_mb is not None:
        return config
    nbytes = sum(param.numel() * max(4, param.itemsize) for param in params)
    least = nbytes // (2 * fragments)  # a bucket exceeds the cap at times
    if config.cap_bytes(nbytes, world_size=world_size) <= least:
        return config
    return replace(config, bucket_cap_mb=max(1, least) / MIB)


def compare_ranks(world: World, own: str, *, code: str = "ranks-built-differently") -> None:
    """Raise MismatchError unless ``own`` is the same on all ranks (collective)."""
    seen = world.all_gather_text(own)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise MismatchError(
                f"rank {rank} has {other}, but rank 0 has {seen[0]}; give every rank the same",
                code=code,
            )
