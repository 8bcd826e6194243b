"""Serves forks of itself: ``python -m tests.forks.server ADDRESS``, until standard input ends.

The server has torch and dearmpi loaded, but not MPI.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
from pathlib import Path
from typing import TypedDict

from tests.forks.start import fork_name, python_beside

# With what these import, that is nearly all that a rank loads, but for MPI.
_LOADED = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.data", "sklearn.datasets"),
    *("torch.distributed.optim", "pytest"),
    *("dearmpi.engine.optimizer", "dearmpi.cli.commands", "dearmpi.cli.run_session"),
    "multiprocessing.forkserver",
)
_MOST_FDS = 64
_FIRST_SPARE_FD = 500
_PR_SET_PDEATHSIG = 1
_FLAGS_WITH_VALUE = ("-W", "-X")
_C = ctypes.CDLL(None, use_errno=True)


class Request(TypedDict):
    """One fork.

    fds: the numbers that its open files have in the client. ignored: signals.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    fds: list[int]
    ignored: list[int]


def main(address: str) -> None:
    """Load, serve; in each fork, run what its client asks for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)  # clients wait while it loads
    first = set(sys.modules)
    loaded: list[str] = []
    atexit.register(_keep, loaded)  # before all others, and so called last
    for name in _LOADED:
        importlib.import_module(name)
    loaded += sys.modules.keys() - first
    assert "mpi4py" not in sys.modules, "a fork must not share MPI with the server"
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [path for path in sys.path if path and path not in listed and path != os.getcwd()]
    gc.collect()
    gc.freeze()  # the forks' collections leave alone what is loaded here, and so do not copy it
    argv = _serve(listener, python_beside(address))
    _run(argv, base)


def _keep(names: list[str]) -> None:
    """Have Python's end leave these modules whole: to take them apart copies what forks share."""
    kept = [sys.modules.pop(name, None) for name in names]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _serve(listener: socket.socket, python: Path) -> list[str]:
    """Fork for each client; returns in the forks alone, with the arguments."""
    clients: dict[int, socket.socket] = {}  # by fork
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client = listener.accept()[0]
                    try:
                        fds, request = _receive(client)
                    except ConnectionError:
                        client.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        _enter_namespaces_of(client)
                        for each in (listener, client, *clients.values()):
                            each.detach()  # closed by number
                        _become(fds, request, python=python)
                        return request["argv"]
                    for fd in fds:
                        os.close(fd)
                    with contextlib.suppress(OSError):  # it was killed meanwhile
                        client.sendall(pid.to_bytes(4, "big"))
                    clients[pid] = client
                    selector.register(client, selectors.EVENT_READ, ("client", pid))
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("fork", pid))
                elif key.fileobj is sys.stdin:  # the process that started the server has ended
                    sys.exit()  # which ends the forks
                elif key.data[0] == "client":  # the launcher has killed it
                    if key.data[1] in clients:  # else its fork has ended at the same moment
                        selector.unregister(key.fileobj)
                        os.kill(key.data[1], signal.SIGKILL)
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _report_ended(key.data[1], clients, selector)


def _report_ended(
    pid: int, clients: dict[int, socket.socket], selector: selectors.BaseSelector
) -> None:
    client = clients.pop(pid)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(KeyError):  # its end has been seen
        selector.unregister(client)
    with contextlib.suppress(OSError):  # it was killed meanwhile
        client.sendall(status.to_bytes(4, "big"))
    client.close()


def _receive(client: socket.socket) -> tuple[list[int], Request]:
    room = socket.CMSG_SPACE(4 * _MOST_FDS)
    head, rights, _, _ = client.recvmsg(4, room)
    fds = array.array("i")
    for _, _, data in rights:
        fds.frombytes(data)
    text = b""
    while not head or len(text) < int.from_bytes(head, "big"):
        part = client.recv(1 << 16)
        if not part:  # it was killed meanwhile
            for fd in fds:
                os.close(fd)
            raise ConnectionError
        text += part
    request: Request = json.loads(text)
    return list(fds), request


def _enter_namespaces_of(client: socket.socket) -> None:
    """Have the name, network and file systems of the client: each emulated host has its own."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    for kind in ("uts", "net", "mnt"):
        path = f"/proc/{pid}/ns/{kind}"
        with contextlib.suppress(FileNotFoundError):  # it was killed meanwhile
            if os.readlink(path) != os.readlink(f"/proc/self/ns/{kind}"):
                fd = os.open(path, os.O_RDONLY)
                if _C.setns(fd, 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {path}")
                os.close(fd)


def _become(fds: list[int], request: Request, *, python: Path) -> None:
    """Take over the client's open files, under their numbers, and its environment and folder.

    python: what the fork and its multiprocessing start as Python.
    """
    os.setsid()  # signals to its group reach the fork and its children, and not the server
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    spare = [os.dup2(fd, _FIRST_SPARE_FD + index) for index, fd in enumerate(fds)]
    os.closerange(3, _FIRST_SPARE_FD)
    for source, target in zip(spare, request["fds"], strict=True):
        os.dup2(source, target)
        os.close(source)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    Path("/proc/self/comm").write_text(fork_name(request["env"]))
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.modules["numpy"].random.seed()
    sys.executable = str(python)
    multiprocessing.set_executable(sys.executable)
    _leave_out_destructors()


def _leave_out_destructors() -> None:
    """Let C's exit() skip the destructors of torch, which take longer than most forks.

    It calls handlers from the last on: those that the fork registers, then these two.
    """
    _C.on_exit(_C._exit, None)
    _C.__cxa_atexit(_C.fflush, None, None)


def _run(argv: list[str], base: list[str]) -> None:
    """Do what ``python ARGV`` does; base: the module path without any addition."""
    while argv[0][0] == "-" and argv[0] not in ("-m", "-c"):  # a flag, for which it is too late
        argv = argv[2 if argv[0] in _FLAGS_WITH_VALUE else 1 :]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.path.dirname(os.path.realpath(argv[0])) if argv[0][0] != "-" else ""
    sys.path[:] = [first, *paths, *base]
    sys.path_importer_cache.clear()  # files have come since the server has looked
    match argv[0]:
        case "-m":
            sys.path[0] = os.getcwd()
            sys.argv = argv[1:]
            sys.modules.pop(argv[1], None)  # Python loads it as __main__ alone
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        case "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), vars(main))
        case script:
            sys.argv = argv
            vars(main)["__file__"] = script
            exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


if __name__ == "__main__":
    main(sys.argv[1])
