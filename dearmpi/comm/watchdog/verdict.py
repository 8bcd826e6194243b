"""Verdict: why a wait can never end, and what to do about it."""

from __future__ import annotations

import sys

from dearmpi.comm.api.call import cure_for
from dearmpi.comm.api.stack import signal_handled
from dearmpi.comm.watchdog.waits import Status

_GIVING_UP = (  # the status of sys.exit is not known here
    "; if the other rank has called sys.exit(), have it raise an exception or call "
    "world.abort(status), which end the job at once"
)
_AT_A_SIGNAL = (
    "let its handler set a flag, agree on the flag on every rank by "
    "world.all_reduce([flag], 'max') between steps, and act then"
)
_INTERRUPTED = (
    f", or Ctrl-C (KeyboardInterrupt) has ended them at different moments: {_AT_A_SIGNAL}"
)


def explain_hopeless(own: Status, other: Status) -> str:
    """Why the wait of ``own`` never ends, where ``other`` never joins it, and what to do.

    Call it on the thread that waits: the signal and the exception that it handles count.
    """
    steps = f"the ranks, which have taken {own.steps} and {other.steps} steps, have"
    if other.left and isinstance(sys.exc_info()[1], KeyboardInterrupt):
        return (
            f"{steps} ended at different moments, as by Ctrl-C (KeyboardInterrupt), so this "
            "rank waits in vain. It cannot save its parameters now: resume from the last "
            f"checkpoint. To save at a signal, {_AT_A_SIGNAL}"
        )
    if handled := signal_handled():
        return (
            f"{steps} not all received {handled}, or received it at different moments, and "
            f"its handler waits here for the others. Instead, {_AT_A_SIGNAL}"
        )
    interrupted = _INTERRUPTED if other.left and other.in_iteration else ""
    calls = [one.waiting for one in (own, other) if one.in_exchange]
    missed = f". For {calls[0]}: {cure_for(*calls)}" if calls else ""
    return (
        f"{steps} unequal numbers of batches, or call collective operations in different "
        f"order{interrupted}. Give every rank the same number of batches, or train inside "
        f"optimizer.join(){missed}{_GIVING_UP if other.left else ''}"
    )
