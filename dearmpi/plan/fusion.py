"""Tensor fusion: which parameters share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.plan.layout import ParamSpec

_LEAST_SHARE = 0.25  # of the cap: with less in it a bucket is not closed


def fuse_by_cap(specs: Sequence[ParamSpec], cap_bytes: int) -> tuple[tuple[ParamSpec, ...], ...]:
    """Group ``specs`` (in feed-forward order) into buckets of about ``cap_bytes`` bytes.

    Buckets fill from the last layer on, so that what does not fill a bucket is left to the first
    layers: their reduce-scatter and all-gather are the ones that no computation hides. A parameter
    that does not fit begins a bucket, alone in it if it is larger than the cap; but it joins one
    that is less than a quarter full, since a bucket costs time whatever it holds. So a bucket has
    at most the cap, or a larger parameter and less than a quarter. Parameters of different dtype
    or device never share a bucket, nor do frozen and trained ones.
    """
    closed: list[list[ParamSpec]] = []
    filling: dict[tuple[str, str, bool], list[ParamSpec]] = {}
    for spec in reversed(specs):
        bucket = filling.get(spec.storage_kind)
        if bucket is not None:
            filled = sum(s.nbytes for s in bucket)
            if filled + spec.nbytes > cap_bytes and filled >= cap_bytes * _LEAST_SHARE:
                bucket = None
        if bucket is None:
            bucket = []
            closed.append(bucket)
            filling[spec.storage_kind] = bucket
        bucket.append(spec)
    position = {spec.name: place for place, spec in enumerate(specs)}
    in_order = [tuple(reversed(bucket)) for bucket in closed]
    return tuple(sorted(in_order, key=lambda bucket: position[bucket[0].name]))
