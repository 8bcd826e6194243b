"""How a run that cannot go on ends."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytest

from dearmpi.cli.endings import RankLog, describe, end_run, exit_code, on_ranks, rank_log
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.errors import CommError, ConfigError, DataError, NonFiniteLossError
from dearmpi.train.ranks.agreement import AgreedError
from tests.fakes.ranks import run_ranks


def fail_inside() -> Exception:
    try:
        raise ValueError("too small")
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 5),
        (CommError("x"), 8),
        (AgreedError("x", exit_code=6), 6),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("the check has failed"), 1),
        (SystemExit(0), 0),
        (SystemExit(), 0),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_raised_on_purpose_is_told_as_it_is(
    alone: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_run(alone, DataError("no file x"), RankLog(logging.getLogger("t"))) == 5
    assert capsys.readouterr().err == "dear-train: error: no file x\n"


def test_an_error_of_the_users_code_is_told_with_its_place_and_the_log() -> None:
    told = describe(fail_inside(), Path("runs/a/logs/rank-00000.log"))
    assert told.startswith(f"error: ValueError: too small ({__file__}:")
    assert "in fail_inside)" in told and told.endswith("rank-00000.log")
    assert "Traceback" in describe(fail_inside(), None)


def exit_by_itself(status: object) -> int:
    """How a command ends of which a rank calls sys.exit."""

    def carry_out(world: World, log: RankLog) -> int:
        sys.exit(status)  # type: ignore[arg-type]

    return on_ranks(carry_out, connect=lambda: World(AloneCollectives(), progress="poll"))


@pytest.mark.parametrize(("status", "code"), [(3, 3), ("the check has failed", 1)])
def test_an_exit_with_a_status_is_told_with_its_place(
    status: object, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the user's code, of which nobody else may know that it calls sys.exit."""
    assert exit_by_itself(status) == code
    said = f"dear-train: error: ended itself, and with it the job, by sys.exit({status!r}) ("
    assert capsys.readouterr().err.startswith(said + __file__)


@pytest.mark.parametrize("status", [0, None])
def test_an_exit_without_one_is_no_failure(
    status: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        exit_by_itself(status)
    assert not capsys.readouterr().err


def test_what_all_ranks_know_is_told_by_the_first_and_aborts_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = NonFiniteLossError("loss is NaN")
    log = RankLog(logging.getLogger("t"))
    assert run_ranks(3, lambda world: end_run(world, error, log)) == [7, 7, 7]
    assert capsys.readouterr().err == "dear-train: error: loss is NaN\n"


def test_the_log_holds_warnings_and_tracebacks(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    with rank_log(speaks=False) as log:
        log.open(path, "rank 0 of 1")
        warnings.warn("watch out", stacklevel=1)
        log.write_exception(fail_inside())
    text = path.read_text()
    assert "rank 0 of 1" in text and "watch out" in text
    assert "Traceback" in text and "ValueError: too small" in text


def test_a_log_that_a_full_disk_cannot_hold_is_told_of_once_and_changes_no_ending(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end() -> int:
        with rank_log(speaks=False) as log:
            log.open(Path("/dev/full"), "rank 0 of 1")
            log.write_exception(fail_inside())
            return 75

    assert end() == 75
    (told,) = capsys.readouterr().err.splitlines()
    assert "warning: cannot write /dev/full: No space left on device" in told


def test_logging_is_put_back_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "dearmpi")
    before = list(logging.getLogger().handlers)
    with rank_log(speaks=True):
        assert logging.getLogger().handlers != before
        assert logging.getLogger("dearmpi").level == logging.INFO
    assert logging.getLogger().handlers == before
    assert logging.getLogger("dearmpi").level == logging.ERROR
    with pytest.warns(UserWarning, match="as ever"):
        warnings.warn("as ever", stacklevel=1)


def test_warnings_are_told_by_the_rank_that_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for speaks in (True, False):
        with rank_log(speaks=speaks):
            warnings.warn("watch out", stacklevel=1)
        assert ("watch out" in capsys.readouterr().err) == speaks
