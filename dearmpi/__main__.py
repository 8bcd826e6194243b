"""``python -m dearmpi SCRIPT``: a script for DistributedDataParallel, unchanged."""

from __future__ import annotations

import sys
from functools import partial

from dearmpi.comm.process import report_alone
from dearmpi.drop_in.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], report=partial(report_alone, prefix="dearmpi: ")))
