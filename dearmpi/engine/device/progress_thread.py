"""On how many cores the progress thread adds and updates: mostly one, the others compute.

With torch's threads for each sum, a rank would have two teams of them on the same cores, of which
one waits for its next sum by spinning (figures in docs/contributing/log.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from dearmpi.comm.world import World
from dearmpi.torch_internals import has_unusual_modes, without_modes

_NOTHING = nullcontext()


def compute_on_one_core(world: World) -> None:
    """Have the progress thread of ``world`` compute by itself; all other threads keep their teams.

    Where waiting threads make progress (poll mode), they compute in plain modes meanwhile.
    """
    _compute_on(1, world)


def compute_on_all_cores(world: World) -> None:
    """Have the progress thread compute with as many threads as the calling one: for updates on the
    host while the model computes on a device.
    """
    _compute_on(torch.get_num_threads(), world)


def _compute_on(num_threads: int, world: World) -> None:
    if world.progress.mode != "thread":
        world.progress.around = _in_plain_modes
        return

    def choose() -> None:
        torch.get_num_threads()  # else the thread's first sum would take the last number given
        torch.set_num_threads(num_threads)

    count = torch.get_num_threads()
    world.on_driving_thread(choose)
    torch.set_num_threads(count)  # torch hands the last number given to every thread to come


def _in_plain_modes() -> AbstractContextManager[object]:
    """Updates made in inference mode would be useless outside of it, and those made under autocast
    would be rounded.
    """
    return without_modes() if has_unusual_modes() else _NOTHING
