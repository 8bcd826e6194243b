"""Share: shares test files among forks of one pytest process, which has collected all tests.

Importing some hundred test files takes as long as running a tenth of them. So one process does, and
each of its forks runs the files that it comes to first. The first process reports for all of them.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest


class Share:
    """The files that run in this process: each is taken by the first process that comes to it."""

    def __init__(self, folder: Path) -> None:
        """folder: exists, and is the same for all processes among which files are shared."""
        self._folder = folder
        self._is_own: dict[str, bool] = {}

    def takes(self, file: str) -> bool:
        """Whether ``file`` runs here; takes it if no process has it."""
        if file not in self._is_own:
            try:
                (self._folder / file.replace("/", ".")).touch(exist_ok=False)
            except FileExistsError:
                self._is_own[file] = False
            else:
                self._is_own[file] = True
        return self._is_own[file]


@dataclass(frozen=True, slots=True)
class _Fork:
    """Another process of the same tests. log: a line for each test that begins, and each report."""

    pid: int
    log: Path


def run_shared(session: pytest.Session, num_processes: int) -> None:
    """Run the tests of ``session`` in this process and in ``num_processes - 1`` forks of it."""
    with tempfile.TemporaryDirectory(prefix="dear-share-") as name:
        taken = Path(name) / "taken"
        taken.mkdir()
        logs = [Path(name) / f"log-{number}" for number in range(1, num_processes)]
        forks = [_start(session, Share(taken), log) for log in logs]
        try:
            _run(session, Share(taken))
        finally:  # also where a first failure is to end all: the fork's own stops it as well
            for fork in forks:
                _join(session, fork)


def _run(session: pytest.Session, share: Share) -> None:
    own = (item for item in session.items if share.takes(item.nodeid.partition("::")[0]))
    following = next(own, None)
    while (item := following) is not None:
        following = next(own, None)  # the test before it ends what it does not need
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _start(session: pytest.Session, share: Share, log: Path) -> _Fork:
    log.touch()
    pid = os.fork()
    if not pid:
        _run_in_fork(session, share, log)
    return _Fork(pid, log)


def _run_in_fork(session: pytest.Session, share: Share, log: Path) -> NoReturn:
    status = 1
    try:
        plugins = session.config.pluginmanager
        capture = plugins.get_plugin("capturemanager")
        assert capture is not None
        capture.stop_global_capturing()  # its files are the first process's
        capture.start_global_capturing()
        plugins.unregister(plugins.get_plugin("terminalreporter"))
        plugins.register(_Reports(session.config, log))
        _run(session, share)
        status = 0
    except (session.Failed, session.Interrupted):
        status = 0  # what failed is in the reports
    except BaseException:
        log.write_text(log.read_text() + json.dumps(traceback.format_exc()) + "\n")
    finally:
        os._exit(status)


class _Reports:
    """Writes what a fork's terminal would show to the first process."""

    def __init__(self, config: pytest.Config, log: Path) -> None:
        self._config, self._log = config, log.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test is under way, should the process end in it."""
        self._write(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Pass on how a part of a test went."""
        hook = self._config.hook
        self._write(hook.pytest_report_to_serializable(config=self._config, report=report))

    def _write(self, line: object) -> None:
        self._log.write(json.dumps(line, default=str) + "\n")


def _join(session: pytest.Session, fork: _Fork) -> None:
    """Wait for a fork, and report what it has run as if it had run here."""
    _, status = os.waitpid(fork.pid, 0)
    hook, last = session.config.hook, ""
    for line in map(json.loads, fork.log.read_text().splitlines()):
        if isinstance(line, str):
            last = line
            continue
        report = hook.pytest_report_from_serializable(config=session.config, data=line)
        if isinstance(report.longrepr, list):  # of a skipped test: JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        hook.pytest_runtest_logreport(report=report)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"a process of tests ended with status {code}, last in {last}")
