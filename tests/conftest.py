"""pytest on one process or on several: `python -m pytest` and `mpiexec -n 4 python -m pytest`.

Tests in tests/mpi run on all ranks together, in one order; all others run on rank 0 alone, after
them, as if there were no launcher. Several ranks without a named file run the covering set, after
which rank 0 starts the unit tests in a process without MPI. Rank 0 reports; another rank speaks
only of its failures. All ranks wait for each other at the end of each test: if some rank failed,
the test has failed on all; and if a rank failed while another still waits for it inside the test,
the whole job is aborted.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import pytest

from dearmpi.comm.api import safe_output
from tests.job import TIMES_VARIABLE, clean_environment
from tests.roster import (
    Roster,
    collect_stacks,
    is_launched,
    launched_rank,
    launched_size,
    roster_folder,
)
from tests.selection import CHOICES, EVERY_TEST, Admitted, is_chosen, may_choose
from tests.share import run_shared
from tests.trials import remember_trials

_MPI_TESTS = Path(__file__).parent / "mpi"
_UNIT_TESTS = Path(__file__).parent / "unit"
_PATIENCE_VARIABLE = "DEARMPI_TEST_PATIENCE_S"
_CUT_SHORT = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
)
_RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
_ROSTER = pytest.StashKey[Roster]()
_FAILED = pytest.StashKey[bool]()
_TIMES = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `bin/test` run some of the tests of all ranks at some world sizes."""
    names = "; ".join(f"{name}: {meaning}" for name, meaning in CHOICES.items())
    parser.addoption(
        "--choice", choices=list(CHOICES), help=f"of the tests in tests/mpi, run these. {names}"
    )
    parser.addoption(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="run the tests in N processes, each of which takes one file after another",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Join the other ranks; every test run is the same as the one before."""
    if not is_launched() or not _is_for_all(config):
        _choose_examples(config)
    if TIMES_VARIABLE in os.environ and not launched_rank():
        config.stash[_TIMES] = Path(os.environ[TIMES_VARIABLE])
    if config.getoption("collectonly") or not is_launched():
        return
    rank, size = launched_rank(), launched_size()
    if _is_short(config):
        config.args = [str(_MPI_TESTS)]
    if size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.stash[_ROSTER] = Roster(roster_folder(), rank=rank, size=size)
    if rank:
        _silence(config)


def _is_for_all(config: pytest.Config) -> bool:
    """Whether only tests of all ranks are asked for: none of them has examples."""
    files = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return _is_short(config) or all(file.is_relative_to(_MPI_TESTS) for file in files)


def _choose_examples(config: pytest.Config) -> None:
    """Say how many examples property tests try."""
    import hypothesis  # takes a quarter of a second

    for name, max_examples in (("fast", 20), ("thorough", 150)):
        hypothesis.settings.register_profile(
            name, derandomize=True, database=None, deadline=None, max_examples=max_examples
        )
    takes_all = config.getoption("markexpr") == EVERY_TEST
    hypothesis.settings.load_profile("thorough" if takes_all else "fast")


def _silence(config: pytest.Config) -> None:
    """Report to nowhere; ``_speak`` says what must be said."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    config.pluginmanager.unregister(reporter)
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which no test is chosen, before they are imported."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or not collection_path.is_relative_to(_MPI_TESTS):
        return None
    file, text = str(collection_path.relative_to(_MPI_TESTS)), collection_path.read_text()
    return None if may_choose(_choice(config), file, text, size=launched_size()) else True


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Make no case of a slow test where none runs: there are thousands, and each rank makes all."""
    config = collector.config
    if config.getoption("markexpr") != "not slow" or any("::" in each for each in config.args):
        return None
    is_slow = any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_slow and callable(obj) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of all ranks first; leave out what is not for here."""
    found = [item for item in items if _runs_on_all(item)]
    together = [item for item in found if _is_for_here(item)]
    alone = [item for item in items if not _runs_on_all(item)]
    left_out = [item for item in found if not _is_for_here(item)]
    if launched_rank():
        alone, left_out = [], left_out + alone
    items[:] = together + alone
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if _ROSTER in config.stash:
        config.stash[_ROSTER].collected([item.nodeid for item in together])


def pytest_collection_finish() -> None:
    """What is loaded by now stays: collections of garbage, of which many tests ask for one, and
    the end of Python need not look through it.
    """
    remember_trials()
    _join_loggers()
    gc.collect()
    gc.freeze()


def _join_loggers() -> None:
    """Have torch's loggers pass on what they log: pytest adds its handlers to each of the dozens
    that do not, six times in each test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch"):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With ``--processes``, run the tests in several processes."""
    num_processes = session.config.getoption("processes")
    if num_processes < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    run_shared(session, num_processes)
    return True


def _is_short(config: pytest.Config) -> bool:
    """Whether several ranks were started without a file or a choice."""
    is_bare = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return launched_size() > 1 and is_bare and config.getoption("choice") is None


def _runs_on_all(item: pytest.Item) -> bool:
    return item.path.is_relative_to(_MPI_TESTS)


def _is_for_here(item: pytest.Item) -> bool:
    """Whether a test of all ranks is for this world size, and among those that were asked for."""
    marker = item.get_closest_marker("ranks")
    admitted = Admitted()
    if marker is not None:
        unknown = set(marker.kwargs) - {"at_least"}
        if unknown:
            raise pytest.UsageError(f"ranks() takes counts and at_least, not {sorted(unknown)}")
        admitted = Admitted(marker.args, **marker.kwargs)
    name = getattr(item, "originalname", None) or item.name
    test = f"{item.path.relative_to(_MPI_TESTS)}::{name}"
    case = getattr(item, "callspec", None)
    return is_chosen(
        _choice(item.config),
        test,
        admitted,
        size=launched_size(),
        gathers_gradients=case is not None and case.params.get("gather") == "gradients",
    )


def _choice(config: pytest.Config) -> str | None:
    choice: str | None = config.getoption("choice")
    return "second" if _is_short(config) else choice


@pytest.fixture(autouse=True)
def _no_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run on rank 0 alone do not see that there are others."""
    if not _runs_on_all(request.node):
        for name in os.environ.keys() - clean_environment().keys():
            monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Note which test is under way, for whoever watches from outside, and how long it took."""
    started_s = time.monotonic()
    roster = item.config.stash.get(_ROSTER, None)
    if roster is not None:
        roster.started(item.nodeid, slow=item.get_closest_marker("slow") is not None)
    try:
        return (yield)
    finally:
        if roster is not None:
            roster.ended()
        if _TIMES in item.config.stash:
            with item.config.stash[_TIMES].open("a") as times:
                times.write(f"{time.monotonic() - started_s:.3f}\t{item.nodeid}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """At the end of a test of all ranks, agree on how it went."""
    report = yield
    failed = item.stash.get(_FAILED, False) or report.failed
    item.stash[_FAILED] = failed
    if report.failed and launched_size() > 1:
        _speak(report)
    if call.when == "teardown" and launched_size() > 1 and _runs_on_all(item):
        _agree(item, report, failed=failed)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Say what this rank could not collect."""
    if report.failed and launched_size() > 1:
        _speak(report)


def _speak(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Say it at once: the job may end before there is a summary."""
    text = f"{report.nodeid} failed in {report.when}\n"
    # First what is wrong: of a long log only a part may be kept.
    crash = getattr(report.longrepr, "reprcrash", None)
    text += f"{crash.message}\n\n" if crash is not None else ""
    text += report.longreprtext
    text += "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections)
    prefix = f"[rank {launched_rank()}] "
    _write("".join(f"{prefix}{line}\n" for line in text.splitlines()))


def _write(text: str) -> None:
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.flush()
    os.write(2, text.encode())


def _agree(item: pytest.Item, report: pytest.TestReport, *, failed: bool) -> None:
    roster = item.config.stash[_ROSTER]
    patience_s = float(os.environ.get(_PATIENCE_VARIABLE, "15")) if failed else None
    agreement = roster.agree(failed=failed, patience_s=patience_s)
    if agreement.missing:
        _abort(roster, f"{item.nodeid} failed on rank {launched_rank()}", agreement.missing)
    if agreement.differing:
        ranks = ", ".join(map(str, agreement.differing))
        _abort(roster, f"rank {launched_rank()} collected other tests than ranks {ranks}", [])
    if agreement.failed and not failed:
        report.outcome = "failed"
        report.longrepr = f"failed on rank {', '.join(map(str, agreement.failed))}, passed here"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Leave together; on rank 0, run the unit tests after the summary where they belong to it."""
    _wait_for_each_other(session)
    result = yield
    if _is_short(session.config) and not launched_rank() and session.exitstatus in _RAN:
        # Not in this process: tests that connect would find the world of this job.
        processes = f"--processes={len(os.sched_getaffinity(0))}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", processes]
        ended = subprocess.run(
            [*command, "-m", session.config.option.markexpr, str(_UNIT_TESTS)],
            cwd=session.config.rootpath,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        session.exitstatus = session.exitstatus or ended.returncode
    return result


def _wait_for_each_other(session: pytest.Session) -> None:
    """Leave together: whoever finalizes MPI first would spin until the others do."""
    if launched_size() == 1 or _ROSTER not in session.config.stash:
        return
    roster = session.config.stash[_ROSTER]
    session.config.option.tbstyle = "no"  # each failure was told when it happened
    if session.exitstatus in _CUT_SHORT:
        status = pytest.ExitCode(session.exitstatus).name
        _abort(roster, f"rank {launched_rank()} ends before the others: {status}", [])
    if launched_rank():
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # rank 0 runs them
        roster.wait_for_root()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the roster."""
    if _ROSTER in config.stash:
        config.stash[_ROSTER].leave()


def _abort(roster: Roster, reason: str, missing: list[int]) -> NoReturn:
    """End the job: the other ranks may never return from what they wait for."""
    text = f"\n===== ABORTED: {reason}"
    if missing:
        text += f"; still inside the test: rank {', '.join(map(str, missing))}"
        text += f"\n{collect_stacks(roster.folder, missing)}"
    _write(text + "\n")
    safe_output.wait_until_read()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        mpi.COMM_WORLD.Abort(1)
    roster.kill_others()
    os._exit(1)
