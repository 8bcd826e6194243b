"""How long a job takes from the loss of a host to its next new step, by ``dear-train restart``.

Four hosts of two ranks each are emulated on this machine: a stand-in for ssh starts a host's
processes, and refuses once the host is lost. The last host's processes are then killed at once.
MPICH's mpirun is needed.

    python -m benchmarks.restarting --times 3
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = ("n0", "n1", "n2", "n3")
RANKS_PER_HOST = 2
LIMIT_S = 180.0
REMOTE = """#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
[ ! -e "{folder}/lost-$host" ] || exit 255
echo $$ >"{folder}/group-$host"
exec sh -c "$*"
"""


def measure(folder: Path) -> tuple[float, int, int]:
    """Seconds from the kill to the next new step, the last step before, and the one resumed at."""
    remote = folder / "remote"
    remote.write_text(REMOTE.format(folder=folder))
    remote.chmod(0o755)
    output = folder / "output"
    programs = Path(sys.executable).parent
    command = [
        *(programs / "dear-train", "restart", programs / "mpirun", "-launcher", "ssh"),
        *("-launcher-exec", remote, "-hosts", ",".join(HOSTS)),
        *("-ppn", RANKS_PER_HOST, "-n", len(HOSTS) * RANKS_PER_HOST),
        *(programs / "dear-train", "run", "--task", "digits", "--max-steps", 1_000_000),
        *("--log-interval", 1, "--checkpoint-interval", 20, "--threads", 1),
        *("--run-folder", folder / "runs", "--name", "a", "--resume", "auto"),
    ]
    with output.open("wb") as file, subprocess.Popen(
        list(map(str, command)), stdout=file, stderr=file, start_new_session=True
    ) as job:  # fmt: skip
        try:
            wait_for(output, r"step (\d+)/", least=60, job=job)
            before = max(int(step) for step in re.findall(r"step (\d+)/", output.read_text()))
            kill_host(folder, HOSTS[-1])
            start_s = time.monotonic()
            resumed = wait_for(output, r"resumed at step (\d+)", least=0, job=job)
            wait_for(output, r"step (\d+)/", least=before + 1, job=job, after="resumed at step")
            return time.monotonic() - start_s, before, resumed
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=60)


def wait_for(
    output: Path, pattern: str, *, least: int, job: subprocess.Popen[bytes], after: str = ""
) -> int:
    """The first number that ``pattern`` finds, ``least`` or more, behind the word ``after``."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        text = output.read_text(errors="replace")
        text = text.partition(after)[2] if after else text
        for found in re.findall(pattern, text):
            if int(found) >= least:
                return int(found)
        time.sleep(0.01)
    raise SystemExit(f"no {pattern!r} of {least} or more in:\n{output.read_text()[-3000:]}")


def kill_host(folder: Path, host: str) -> None:
    """Lose ``host``: nothing starts on it any more, and what it runs is killed."""
    (folder / f"lost-{host}").touch()
    first = int((folder / f"group-{host}").read_text())
    doomed = [first]
    for pid in doomed:  # grows meanwhile
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        doomed += map(int, children)
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="how often it is measured")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the job ends with this
    for number in range(parser.parse_args().times):
        with tempfile.TemporaryDirectory(prefix="dear-restart-") as folder:
            seconds, before, resumed = measure(Path(folder))
        ranks = len(HOSTS) * RANKS_PER_HOST
        print(
            f"{number + 1}: {ranks} to {ranks - RANKS_PER_HOST} ranks, killed at step {before}, "
            f"resumed at {resumed}, next new step after {seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
