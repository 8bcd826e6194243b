"""A failure on any rank becomes the same failure on all of them."""

from __future__ import annotations

import pytest

from dearmpi.comm.world import World
from dearmpi.errors import CommError, ConfigError, DataError, MismatchError
from dearmpi.train.ranks.agreement import AgreedError, is_agreed, share_failure, together
from tests.fakes.ranks import run_ranks


def attempt(
    world: World, failures: dict[int, Exception], *, root_only: bool = False
) -> AgreedError:
    with pytest.raises(AgreedError) as caught, together(world, root_only=root_only):
        if world.rank in failures:
            raise failures[world.rank]
    return caught.value


def test_all_ranks_learn_which_one_failed_and_how() -> None:
    errors = run_ranks(
        3, lambda world: attempt(world, {1: DataError("no file x", code="file-missing")})
    )
    assert {(error.exit_code, error.code) for error in errors} == {(5, "file-missing")}
    assert {str(error).split(": ")[1] for error in errors} == {"no file x"}
    assert all(str(error).startswith("rank 1 on ") for error in errors)
    assert [type(error.__cause__) for error in errors] == [type(None), DataError, type(None)]


def test_what_all_ranks_say_alike_is_told_once_without_ranks() -> None:
    failures: dict[int, Exception] = {rank: ConfigError("bad flag") for rank in range(3)}
    assert {str(error) for error in run_ranks(3, lambda w: attempt(w, failures))} == {"bad flag"}


def test_what_only_the_root_does_needs_no_rank_in_its_message() -> None:
    failures: dict[int, Exception] = {0: ConfigError("folder is taken")}
    errors = run_ranks(2, lambda world: attempt(world, failures, root_only=True))
    assert {str(error) for error in errors} == {"folder is taken"}


def test_different_failures_are_all_told_and_the_first_ranks_code_counts() -> None:
    failures: dict[int, Exception] = {1: DataError("no data"), 2: ConfigError("bad flag")}
    error = run_ranks(3, lambda world: attempt(world, failures))[0]
    assert error.exit_code == DataError.exit_code
    assert "no data" in str(error) and "bad flag" in str(error)


def test_an_error_that_nobody_foresaw_is_told_with_its_traceback() -> None:
    error = run_ranks(2, lambda world: attempt(world, {1: ZeroDivisionError("oops")}))[0]
    assert (error.exit_code, error.code) == (1, "unforeseen-failure")
    assert "Traceback" in str(error) and "ZeroDivisionError: oops" in str(error)


def test_a_long_failure_is_cut_for_the_others_and_whole_on_the_rank_that_has_it() -> None:
    """Every rank holds the texts of all: a quoted sample would take gigabytes on thousands."""
    sample = "".join(f"{number:07}," for number in range(25_000))

    sent: list[int] = []

    def work(world: World) -> AgreedError:
        gather = world.all_gather_text

        def note(text: str) -> list[str]:
            sent.append(len(text))
            return gather(text)

        world.all_gather_text = note  # type: ignore[method-assign]
        return attempt(world, {1: DataError(f"row 7 of a.csv holds {sample} and no label")})

    other, failed = run_ranks(2, work)
    assert max(sent) < 9_000
    assert str(other) == str(failed)
    assert "rank 1 on fakehost: row 7 of a.csv holds 0000000," in str(other)
    assert str(other).endswith("0024999, and no label")
    assert "[... 192034 characters are cut here; the log of the rank that failed" in str(other)
    assert sample in str(failed.__cause__)


def test_many_ranks_that_each_fail_otherwise_are_counted_beyond_the_first() -> None:
    failures: dict[int, Exception] = {rank: DataError(f"no file {rank}") for rank in range(12)}
    error = run_ranks(12, lambda world: attempt(world, failures))[3]
    assert "rank 7 on fakehost: no file 7\nand 4 more ranks failed in other ways" in str(error)
    assert len(str(error).splitlines()) == 9


def test_success_everywhere_goes_on_and_keeps_what_was_made() -> None:
    def work(world: World) -> int:
        with together(world):
            made = world.rank + 1
        share_failure(world, None)
        return made

    assert run_ranks(2, work) == [1, 2]


def test_only_failures_that_all_ranks_know_of_are_agreed() -> None:
    assert is_agreed(AgreedError("x", exit_code=2))
    assert is_agreed(MismatchError("x"))
    assert not is_agreed(CommError("x"))
    assert not is_agreed(DataError("x"))
