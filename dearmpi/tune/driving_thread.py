"""Driving thread: its sums and updates take one core, and leave the others to computation.

With torch's threads for each sum, a rank would have two teams of them on the same cores, of which
one waits for its next sum by spinning (figures in docs/log.md).
"""

from __future__ import annotations

import torch

from dearmpi.comm.world import World


def drive_on_one_core(world: World) -> None:
    """Have the thread that drives progress compute by itself; all others keep their threads."""
    if world.progress.mode != "thread":
        return
    count = torch.get_num_threads()
    world.on_driving_thread(_compute_alone)
    torch.set_num_threads(count)  # torch hands the last number given to every thread to come


def _compute_alone() -> None:
    torch.get_num_threads()  # else the thread's first sum would take the last number given
    torch.set_num_threads(1)
