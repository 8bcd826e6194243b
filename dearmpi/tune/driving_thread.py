"""Driving thread: on how many cores its sums and updates run; mostly on one, which leaves the
others to computation.

With torch's threads for each sum, a rank would have two teams of them on the same cores, of which
one waits for its next sum by spinning (figures in docs/contributing/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from dearmpi.comm.world import World

_NOTHING = nullcontext()
_CASTING = ("cpu", "cuda")  # devices that have an autocast


def drive_on_one_core(world: World) -> None:
    """Have the thread that drives progress compute by itself; all others keep their threads.

    Where the threads that wait drive it, it computes as it would on one of its own, whatever mode
    they are in.
    """
    _drive_on(1, world)


def drive_on_all_cores(world: World) -> None:
    """Have the thread that drives progress compute with as many threads as the calling one: for
    updates on the host while computation is on a device.
    """
    _drive_on(torch.get_num_threads(), world)


def _drive_on(num_threads: int, world: World) -> None:
    if world.progress.mode != "thread":
        world.progress.around = _as_ever
        return

    def choose() -> None:
        torch.get_num_threads()  # else the thread's first sum would take the last number given
        torch.set_num_threads(num_threads)

    count = torch.get_num_threads()
    world.on_driving_thread(choose)
    torch.set_num_threads(count)  # torch hands the last number given to every thread to come


def _as_ever() -> AbstractContextManager[object]:
    """Else what an evaluation's wait updates would be of no use outside of its inference mode, and
    what one under autocast does would be rounded.
    """
    is_casting = any(map(torch.is_autocast_enabled, _CASTING))
    # As in a selective checkpoint, and with a default device.
    is_watched = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func
    unusual = torch.is_inference_mode_enabled() or is_casting or is_watched or is_transformed
    return _without_modes() if unusual else _NOTHING


@contextmanager
def _without_modes() -> Iterator[None]:
    with ExitStack() as left:
        left.enter_context(temporarily_clear_interpreter_stack())
        left.enter_context(_disable_current_modes())
        left.enter_context(torch._C.DisableTorchFunction())
        for device in _CASTING:
            left.enter_context(torch.autocast(device, enabled=False))
        left.enter_context(torch.inference_mode(False))
        left.enter_context(torch.no_grad())
        yield
