"""Processes as forks of one that has torch loaded, so that each starts in a fraction of a second.

Begin with ``forked``, which replaces a command of Python. ``client`` is the small process that is
started in place of Python: it passes its arguments, environment and open files to ``server``, which
forks. The client passes on signals, and ends with the status of its fork.
"""

from __future__ import annotations

from tests.forks.start import forked, share_server

__all__ = ["forked", "share_server"]
