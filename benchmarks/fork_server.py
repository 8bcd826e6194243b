"""Ranks that are forks of one process with torch loaded, so that a job of theirs takes a second.

A launcher starts ``command(...)`` in place of Python. That small process hands its arguments, its
environment and its open files to the server, which forks; it ends with the fork's own status, and
the fork is killed if it ends before. The forks have loaded no MPI.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TypedDict

_MOST_FDS = 64
_TICK_S = 0.005


class Wanted(TypedDict):
    """What a fork is to be; fds: the numbers that its open files have."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    fds: list[int]


class ForkServer:
    """A server of ``python``; a context manager."""

    def __init__(self, python: Path) -> None:
        self._python = python

    def __enter__(self) -> ForkServer:
        self._folder = tempfile.TemporaryDirectory()
        self._address = os.path.join(self._folder.name, "socket")
        root = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [self._python, __file__, "serve", self._address],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the fork server did not start; its error is above")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def command(self, script: Path, *arguments: str) -> list[str | Path]:
        """What a launcher starts for ``python script arguments``."""
        start: list[str | Path] = [self._python, "-I", "-S", __file__, "ask", self._address]
        return [*start, script, *arguments]


def _ask(address: str, arguments: list[str]) -> None:
    """Have the server run ``arguments``, and end as that fork ends."""
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    wanted = Wanted(argv=arguments, env=dict(os.environ), cwd=os.getcwd(), fds=fds)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        text = json.dumps(wanted).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        server.sendmsg([len(text).to_bytes(4, "big")], rights)
        server.sendall(text)
        status = int.from_bytes(server.recv(4), "big")
    # The files that the launcher watches are open until here, as they are in a process that ends.
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # that of the listing
        return False
    return True


def _serve(address: str) -> list[str]:
    """Fork for each who asks; returns in the forks, with the arguments."""
    waiting: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select(_TICK_S):
                if key.fileobj is listener:
                    client = listener.accept()[0]
                    fds, wanted = _receive(client)
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        for other in (listener, client, *waiting.values()):
                            other.detach()
                        _become(fds, wanted)
                        return wanted["argv"]
                    for fd in fds:
                        os.close(fd)
                    waiting[pid] = client
                    selector.register(client, selectors.EVENT_READ, pid)
                else:  # the launcher has killed who asked
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            _report_ended(waiting, selector)


def _report_ended(waiting: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = waiting.pop(pid)
        if client in (key.fileobj for key in selector.get_map().values()):
            selector.unregister(client)
            with contextlib.suppress(OSError):  # who asked was killed meanwhile
                client.sendall(status.to_bytes(4, "big"))
        client.close()


def _receive(client: socket.socket) -> tuple[list[int], Wanted]:
    room = socket.CMSG_SPACE(4 * _MOST_FDS)
    head, rights, _, _ = client.recvmsg(4, room)
    fds = array.array("i")
    for _, _, data in rights:
        fds.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += client.recv(1 << 16)
    wanted: Wanted = json.loads(text)
    return list(fds), wanted


def _become(fds: list[int], wanted: Wanted) -> None:
    """Take over open files, under their numbers, environment and folder of who asked."""
    high = [os.dup2(fd, 500 + index) for index, fd in enumerate(fds)]
    os.closerange(3, 500)
    for source, target in zip(high, wanted["fds"], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])


if __name__ == "__main__":
    action, address = sys.argv[1:3]
    if action == "ask":
        _ask(address, sys.argv[3:])
    import runpy

    import torch  # noqa: F401

    import dearmpi

    dearmpi.DistributedOptimizer  # noqa: B018  which is loaded when it is first looked at
    assert "mpi4py.MPI" not in sys.modules
    sys.argv = _serve(address)
    runpy.run_path(sys.argv[0], run_name="__main__")
