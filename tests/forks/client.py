"""Stands for one fork: ``python -I -S client.py ADDRESS ARGUMENTS ...``.

Imports little, since it starts anew for each fork.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

_PASSED_ON = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


def main() -> None:
    """Have the server run the arguments as Python would; end as the fork ends."""
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    ignored = [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "argv": sys.argv[2:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "fds": fds,
        "ignored": ignored,
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    text = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    server.sendmsg([len(text).to_bytes(4, "big")], rights)
    server.sendall(text)
    pid = int.from_bytes(server.recv(4), "big")
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    answer = server.recv(4)  # the files that a launcher watches stay open until here
    if not answer:
        sys.exit("the fork server has ended")
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by in _PASSED_ON:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    os._exit(os.WEXITSTATUS(status))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # the descriptor of the listing itself
        return False
    return True


if __name__ == "__main__":
    main()
