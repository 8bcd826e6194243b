"""Puts faults into a copy of the package, one at a time, and runs the tests that must find them.

    python tests/faults/run.py [NUMBER ...]

Numbers are those of tests/README.md; without any, all. Ends with a table, and with status 1 if some
fault was not found. The copy is in the folder for temporary files.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path.insert(0, str(ROOT))

from tests.faults.table import FAULTS, Fault  # noqa: E402

_COPIED = ("dearmpi", "tests", "benchmarks", "setup.cfg", "pyproject.toml")


def main() -> int:
    """Try faults; the exit status."""
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(FAULTS) + 1)
    rows, is_good = [], True
    for number in numbers:
        started_s = time.monotonic()
        result = _try(FAULTS[number - 1])
        is_good &= result == "found"
        rows.append(f"{number:3} {result:14} {time.monotonic() - started_s:5.0f} s")
        print(rows[-1], FAULTS[number - 1].what, flush=True)
    print("\n".join(["", *rows]))
    return 0 if is_good else 1


def _try(fault: Fault) -> str:
    with tempfile.TemporaryDirectory(prefix="dear-fault-") as name:
        root = Path(name)
        for part in _COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, root / part)
        path = root / "dearmpi" / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            return "does not fit"
        path.write_text(text.replace(fault.old, fault.new))
        status = _run(root, fault)
    return {0: "NOT FOUND", 4: "no such test", 5: "no such test"}.get(status, "found")


def _run(root: Path, fault: Fault) -> int:
    """The status of the tests, in a process of their own."""
    import torch  # noqa: F401 - once for all faults: each process is a copy of this one

    arguments = ["-q", "-x", "-p", "no:cacheprovider", *fault.tests]
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    with (Path(tempfile.gettempdir()) / "dear-fault.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if fault.tests[0].startswith("tests/mpi"):
        launch = [sys.executable, "tests/launch.py", "--ranks", str(fault.ranks), *arguments]
        os.execv(sys.executable, [*launch, "--test-limit", "60"])
    sys.path[:] = [str(root), *(entry for entry in sys.path if entry != str(ROOT))]
    for module in [name for name in sys.modules if name.split(".")[0] in ("tests", "dearmpi")]:
        del sys.modules[module]
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
