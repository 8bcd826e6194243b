"""Tensor fusion: which parameters share a bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain

from dearmpi.plan.data.layout import ParamSpec

_LEAST_SHARE = 0.25  # of the cap: with less in it a bucket is not closed
_FIRST_SHARE = 1 / 16  # of the cap: about what the first layers have to themselves


def fuse_by_cap(specs: Sequence[ParamSpec], cap_bytes: int) -> tuple[tuple[ParamSpec, ...], ...]:
    """Group ``specs`` (in feed-forward order) into buckets of about ``cap_bytes`` bytes.

    Buckets fill from the last layer on. A parameter that does not fit begins a bucket, alone in it
    if it is larger than the cap; but it joins one that is less than a quarter full, since a bucket
    costs time whatever it holds. So a bucket exceeds the cap only by what was in it before the
    parameter that did not fit, less than a quarter, or where that is larger than the cap itself.
    Parameters of different dtype or device never share a bucket, nor do frozen and trained ones.

    The first layers' reduce-scatter and all-gather are the ones that no computation hides. So what
    their bucket holds behind the parameter that makes it a sixteenth full is a bucket of its own,
    if that is a quarter full.
    """
    closed: list[list[ParamSpec]] = []
    filling: dict[tuple[str, str, bool], tuple[list[ParamSpec], int]] = {}  # with its bytes
    for spec in reversed(specs):
        bucket, filled = filling.get(spec.storage_kind, (None, 0))
        nbytes = spec.nbytes
        if filled + nbytes > cap_bytes and filled >= cap_bytes * _LEAST_SHARE:
            bucket, filled = None, 0
        if bucket is None:
            bucket = []
            closed.append(bucket)
        bucket.append(spec)
        filling[spec.storage_kind] = bucket, filled + nbytes
    position = {spec.name: place for place, spec in enumerate(specs)}
    in_order = [tuple(reversed(bucket)) for bucket in closed]
    trained = (bucket for bucket in in_order if bucket[0].trained)
    first = min(trained, key=lambda bucket: position[bucket[0].name], default=())
    parts = (_part(bucket, cap_bytes) if bucket is first else [bucket] for bucket in in_order)
    return tuple(sorted(chain(*parts), key=lambda bucket: position[bucket[0].name]))


def _part(bucket: tuple[ParamSpec, ...], cap_bytes: int) -> list[tuple[ParamSpec, ...]]:
    """The first layers' ``bucket``, in two where that is worth a bucket."""
    ends = [*accumulate(spec.nbytes for spec in bucket)]
    count = bisect_left(ends, cap_bytes * _FIRST_SHARE) + 1  # less would not be worth a bucket
    if count >= len(bucket) or ends[-1] - ends[count - 1] < cap_bytes * _LEAST_SHARE:
        return [bucket]
    return [bucket[:count], bucket[count:]]
