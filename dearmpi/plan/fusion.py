"""Tensor fusion: which parameters share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.plan.layout import ParamSpec


def fuse_by_cap(specs: Sequence[ParamSpec], cap_bytes: int) -> tuple[tuple[ParamSpec, ...], ...]:
    """Group ``specs`` (in feed-forward order) into buckets of at most ``cap_bytes`` bytes.

    A parameter larger than the cap gets a bucket of its own. Buckets fill from the last layer on,
    so that what does not fill a bucket is left to the first layers: their reduce-scatter and
    all-gather are the ones that no computation hides. Parameters of different dtype or device
    never share a bucket, nor do frozen and trained ones.
    """
    closed: list[list[ParamSpec]] = []
    filling: dict[tuple[str, str, bool], list[ParamSpec]] = {}
    for spec in reversed(specs):
        bucket = filling.get(spec.storage_kind)
        if bucket is not None and sum(s.nbytes for s in bucket) + spec.nbytes > cap_bytes:
            bucket = None
        if bucket is None:
            bucket = []
            closed.append(bucket)
            filling[spec.storage_kind] = bucket
        bucket.append(spec)
    position = {spec.name: place for place, spec in enumerate(specs)}
    in_order = [tuple(reversed(bucket)) for bucket in closed]
    return tuple(sorted(in_order, key=lambda bucket: position[bucket[0].name]))
