"""``python -m dearmpi SCRIPT``: a script for DistributedDataParallel, unchanged."""

from __future__ import annotations

import sys

from dearmpi.drop_in.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
