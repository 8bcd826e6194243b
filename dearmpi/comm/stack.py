"""Stack: where in the program a thread is."""

from __future__ import annotations

import os
import sys
import threading
import traceback

_NUM_FRAMES = 6
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_HIDDEN = (_PACKAGE, threading.__file__)
_LIBRARIES = tuple(f"site-packages{os.sep}{name}{os.sep}" for name in ("torch", "click"))


def stack_of(thread: int) -> tuple[str, ...]:
    """The innermost frames of ``thread``, without those of this package, of torch and of click.

    Without a look at source files, which may lie on a disk that does not answer.
    """
    innermost = sys._current_frames().get(thread)
    if innermost is None:  # it has ended
        return ()
    frames = [(frame.f_code, line) for frame, line in traceback.walk_stack(innermost)][::-1]
    own = [
        (code, line)
        for code, line in frames
        if not code.co_filename.startswith(_HIDDEN)
        and not any(library in code.co_filename for library in _LIBRARIES)
    ]
    shown = (own or frames)[-_NUM_FRAMES:]
    return tuple(f"{code.co_filename}:{line} {code.co_name}" for code, line in shown)
