"""Checkpoints: snapshots of a run on disk, complete or not there.

`snapshot` is what is written, `part` a rank's share of it, `manifest` the list beside the parts.
"""

from __future__ import annotations

from dearmpi.train.checkpoint.snapshot import (
    Snapshot,
    check_model,
    optimizer_by_name,
    optimizer_state_dict,
    parameter_names,
)
from dearmpi.train.checkpoint.store import PendingCheckpoint, load, read, save, verify
from dearmpi.train.checkpoint.survey import (
    Survey,
    find_best,
    find_latest,
    name_best,
    prune,
    resolve,
    survey,
)

__all__ = [
    "PendingCheckpoint",
    "Snapshot",
    "Survey",
    "check_model",
    "find_best",
    "find_latest",
    "load",
    "name_best",
    "optimizer_by_name",
    "optimizer_state_dict",
    "parameter_names",
    "prune",
    "read",
    "resolve",
    "save",
    "survey",
    "verify",
]
