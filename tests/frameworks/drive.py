"""Runs scripts one after another in this process: imports take longer than training.

python drive.py SCRIPT [ARGUMENT ...] [+ SCRIPT [ARGUMENT ...]] ...
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Run each as ``__main__``."""
    given, runs = sys.argv[1:], []
    while given:
        end = given.index("+") if "+" in given else len(given)
        runs.append(given[:end])
        given = given[end + 1 :]
    for arguments in runs:
        print("drive:", *arguments, file=sys.stderr, flush=True)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
