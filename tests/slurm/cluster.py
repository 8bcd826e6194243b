"""Cluster: a real SLURM of several nodes on this machine, without systemd and without root.

Everything lives below one folder, and nothing is needed in /etc. A node is a slurmd with a name and
a port of its own (``slurmd -N``), which Debian's packages can do; it claims more CPUs than the
machine may have. Jobs in the partition ``urgent`` preempt those in ``main``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
_SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_POLL_S = 0.05
_START_S = 30.0
KILL_WAIT_S = 30  # SLURM's default
_MESSAGE_S = 30.0

_CONFIGURATION = """\
ClusterName=dearmpi
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
TmpFS={folder}/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def find_program(name: str) -> str | None:
    """Its path; daemons lie where not every PATH looks."""
    return shutil.which(name, path=_SBIN)


def missing_programs() -> list[str]:
    """Those of PROGRAMS that this machine lacks."""
    return [name for name in PROGRAMS if find_program(name) is None]


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as the controller sees it.

    state: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED ...
    exit_code: of the batch script.
    restarts: how often it was put back into the queue.
    """

    state: str
    exit_code: int
    restarts: int


class Cluster:
    """munged, slurmctld and ``num_nodes`` slurmd; a context manager that ends them and all jobs.

    folder: an empty one that any user may enter, as munged asks; it is left as it is at the end.
    environment: of the commands that are run, and so of the jobs.
    kill_wait_s: how long a job that is ended has between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        folder: Path,
        *,
        environment: dict[str, str],
        num_nodes: int = 2,
        kill_wait_s: int = KILL_WAIT_S,
    ) -> None:
        self.folder = folder
        self.nodes = tuple(f"s{index}" for index in range(num_nodes))
        self.environment = environment | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._kill_wait_s = kill_wait_s
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._write_files()
            self._start_daemons()
            ready = f"idle {len(self.nodes)}"
            self.wait_until(lambda: self.call("sinfo", "-h", "-p", "main", "-o", "%T %D") == ready)
        except BaseException:
            self._stop_daemons()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
            self.call("scancel", "--user", _user())
            self.wait_until(lambda: not self.call("squeue", "-h"))
        self._stop_daemons()

    def call(self, program: str, *arguments: str | Path, folder: Path | None = None) -> str:
        """Standard output of a program, started in ``folder``, without blanks at its ends."""
        done = subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=_MESSAGE_S,
            env=self.environment,
            cwd=folder,
            check=False,
        )
        if done.returncode:
            raise subprocess.SubprocessError(f"{program} {arguments}: {done.stderr}")
        return done.stdout.strip()

    def job(self, number: int) -> JobState:
        """How the job is."""
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number))
        fields = dict(item.split("=", 1) for item in shown.split() if "=" in item)
        code = int(fields["ExitCode"].partition(":")[0])
        return JobState(fields["JobState"], code, int(fields["Restarts"]))

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = _START_S) -> None:
        """Poll; TimeoutError, with the ends of the logs, if it does not become true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended:
                raise RuntimeError(f"{ended} ended\n{self._logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s\n{self._logs()}")
            time.sleep(_POLL_S)

    def _logs(self) -> str:
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in logs)

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", "tmp", "log"):
            (self.folder / name).mkdir(parents=True, mode=0o711)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = _CONFIGURATION.format(
            host=host,
            user=_user(),
            folder=self.folder,
            controller_port=ports[0],
            kill_wait_s=self._kill_wait_s,
            nodes="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(text)

    def _start_daemons(self) -> None:
        munge = self.folder / "munge"
        self._start(
            "munged",
            "--foreground",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        self.wait_until((munge / "socket").exists)
        self._start("slurmctld", "-D", "-c")
        for name in self.nodes:
            self._start("slurmd", "-D", "-N", name, prefix=_own_shared_memory())

    def _start(self, name: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        program = find_program(name)
        assert program is not None, f"no {name}: ask missing_programs() first"
        with (self.folder / "log" / f"{name}-{len(self._daemons)}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*prefix, program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment,
                    cwd=self.folder,
                    start_new_session=True,
                    # Jobs inherit them, and a shell cannot trap what was ignored when it began.
                    preexec_fn=_default_signals,
                )
            )

    def _stop_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()


@functools.cache
def _own_shared_memory() -> tuple[str, ...]:
    """What starts a program with a /dev/shm of its own, where this process may do that.

    MPICH names shared memory by the job's number, the same on all nodes of a job and whenever the
    job is queued again. Ranks of different nodes must not meet there.
    """
    command = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
    if shutil.which("unshare") is None:
        return ()
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=_MESSAGE_S, check=False)
    return command if tried.returncode == 0 else ()


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _default_signals() -> None:
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses at present."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
