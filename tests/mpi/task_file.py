"""Task file: a task of a test's own, in a folder that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dearmpi.comm.world import World


@contextmanager
def task_file(world: World, path: Path, text: str) -> Iterator[Path]:
    """The folder of ``path``, into which rank 0 has written ``text`` (collective); torch has as
    many threads afterwards as before.
    """
    if world.is_root:
        path.write_text(text)
    world.barrier()
    threads = torch.get_num_threads()
    yield path.parent
    torch.set_num_threads(threads)
