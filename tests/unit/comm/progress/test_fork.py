"""A process that is forked while operations are under way does not wait for them."""

from __future__ import annotations

import os
import signal
import threading

from dearmpi.comm.progress import Progress
from dearmpi.errors import CommError


def test_a_fork_does_not_wait_for_what_its_parent_drives() -> None:
    progress = Progress("thread", origin="rank 0 on here")
    there, back = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            progress.wait_until(threading.Event().is_set, what="RS0")
        except CommError as error:
            os.write(back, str(error).encode())
        finally:
            os._exit(0)
    os.close(back)
    with os.fdopen(there) as said:
        text = said.read()
    os.waitpid(child, 0)
    progress.close()
    assert "forked from rank 0 on here waits for RS0" in text and "synchronize()" in text
