"""Ranks: a command that all of them carry out, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dearmpi.cli.failure import complain_alone, end_run, exit_code
from dearmpi.cli.rank_log import rank_log
from dearmpi.errors import DearError

if TYPE_CHECKING:
    from dearmpi.cli.rank_log import RankLog
    from dearmpi.comm.world import World


def on_ranks(
    carry_out: Callable[[World, RankLog], int],
    *,
    connect: Callable[[], World],
    failure: DearError | None = None,
) -> int:
    """``connect`` the ranks and ``carry_out`` a command on all of them, or tell once of a
    ``failure`` that this rank has met before. Returns the exit code.
    """
    from dearmpi.train.ranks.agreement import share_failure

    try:
        world = connect()
    except DearError as error:
        first = failure or error
        complain_alone(first)
        return exit_code(first)
    with rank_log(speaks=world.is_root) as log:
        try:
            share_failure(world, failure)
            return carry_out(world, log)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and exit_code(error) == 0:
                raise  # as a program does that has come to its end
            return end_run(world, error, log)
