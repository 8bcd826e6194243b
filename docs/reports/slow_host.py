"""bytes-lm in which host n1 computes longer, as if it were shared with other work.

dear-train run --task docs/reports/slow_host.py:build --task-option seconds=0.1
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping

from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.task import Task

HOST = "n1"


def build(options: Mapping[str, str]) -> Task:
    """The task. Option ``seconds``: how much longer each feed-forward takes on the slow host."""
    others = dict(options)
    seconds = float(others.pop("seconds", "0.1"))
    task = build_bytes_lm(others)
    if platform.node() == HOST:
        task.model.get_submodule("output").register_forward_hook(lambda *_: time.sleep(seconds))
    return task
