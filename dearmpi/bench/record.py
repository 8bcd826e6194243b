"""A benchmark's result as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Any

import torch

import dearmpi
from dearmpi.bench.collectives import CollectivesResult
from dearmpi.bench.result import Result, Row


def result_json(result: Result) -> str:
    """``result`` with every iteration, as JSON."""
    return _dump(as_plain(result))


def collectives_json(result: CollectivesResult) -> str:
    """``result`` as JSON."""
    plain = asdict(result)
    for row, times in zip(plain["rows"], result.rows, strict=True):
        row["overlap"] |= {"imb": times.overlap.imb, "osu": times.overlap.osu}
    return _dump(plain)


def as_plain(result: Result) -> dict[str, Any]:
    """``result`` as mappings, lists, texts and numbers; times in seconds, sizes in bytes."""
    bounds = result.bounds
    plain = asdict(result)
    plain["alone"] = _row_as_plain(result, result.alone)
    plain["rows"] = [_row_as_plain(result, row) for row in result.rows]
    if bounds is not None:
        plain["bounds"] = asdict(bounds) | {
            "dear_s": bounds.dear_s,
            "absolute_s": bounds.absolute_s,
            "compute_s": bounds.compute_s,
            "communication_s": bounds.communication_s,
        }
    return plain


def _row_as_plain(result: Result, row: Row) -> dict[str, Any]:
    plain = asdict(row)
    bounds = result.bounds
    if row.blocks:
        plain |= {"median_s": row.median_s, "cpu_s": row.cpu_s, "peak_bytes": row.peak_bytes}
        plain["per_cpu"] = result.rate(row.median_s)
        if bounds is not None:
            plain["ratio_to_dear_bound"] = row.median_s / bounds.dear_s
            plain["ratio_to_absolute_bound"] = row.median_s / bounds.absolute_s
            plain["exposed_s"] = row.median_s - bounds.compute_s
    return plain


def _dump(plain: dict[str, Any]) -> str:
    versions = {
        "dearmpi": dearmpi.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return json.dumps(plain | {"versions": versions}, indent=1) + "\n"
