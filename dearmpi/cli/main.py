"""dear-train: the program. It imports little by itself, so that Ctrl-C finds it ready at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dearmpi.cli.interrupts import loading


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    with loading():
        from dearmpi.cli.commands import carry_out
    return carry_out(arguments)


if __name__ == "__main__":
    sys.exit(main())
