"""What `bin/test` runs on how many ranks."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest

from tests.sections import list_sections, list_torch_sections
from tests.selection import (
    CHOICES,
    COVERING,
    SECOND_MPI_JOBS,
    SIZES,
    TORCH,
    UNEVEN,
    Admitted,
    is_chosen,
    may_choose,
)

MPI_TESTS = Path(__file__).resolve().parents[1] / "mpi"
FAST, OTHER = "test_semantics_state.py::test_a", "test_zero_grad.py::test_a"
COVERED = "test_join.py::test_a"


def sizes(choice: str | None, test: str, admitted: Admitted = Admitted()) -> list[int]:  # noqa: B008
    return [size for size in SIZES if is_chosen(choice, test, admitted, size=size)]


def test_a_test_without_a_marker_runs_on_two_ranks_and_uneven_shares_on_three() -> None:
    assert sizes("fast", OTHER) == [2]
    assert sizes("fast", FAST) == [2, 3]
    assert sizes("fast", "test_semantics_modules.py::test_a") == [2]
    assert sizes("fast", COVERED) == [1, 2, 3]
    assert not is_chosen("fast", FAST, Admitted(), size=3, gathers_gradients=True)
    assert is_chosen("fast", FAST, Admitted(), size=2, gathers_gradients=True)
    assert sizes("fast", COVERING[0]) == [1, 2, 3, 4, 5]
    assert sizes("ranks", OTHER) == sizes(None, OTHER) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        (Admitted(at_least=3), [3]),
        (Admitted((4,)), [4]),
        (Admitted((1, 3)), [1]),
        (Admitted(at_least=2), [2]),
        (Admitted((1,)), []),
    ],
)
def test_a_test_that_is_not_for_two_ranks_runs_on_the_fewest(
    admitted: Admitted, expected: list[int]
) -> None:
    assert sizes("fast", OTHER, admitted) == expected


def test_tests_for_one_rank_alone_start_jobs_and_run_once() -> None:
    alone = Admitted((1,))
    assert sizes("jobs", OTHER, alone) == [1]
    assert sizes("ranks", OTHER, alone) == sizes("second-jobs", OTHER, alone) == []
    assert sizes("second-jobs", "test_finalisation.py::test_a", alone) == [1]
    assert sizes("jobs", OTHER) == []


def test_a_second_mpi_has_the_covering_set() -> None:
    assert sizes("second", COVERED, Admitted((2, 3))) == [2, 3]
    assert sizes("second", OTHER) == []


def test_another_torch_has_the_covering_set_and_what_looks_into_torch() -> None:
    looks = "test_semantics_compiled_blocks.py::test_a"
    assert sizes("torch", COVERED) == sizes("torch", looks) == [1, 2, 3, 4, 5]
    assert sizes("torch", OTHER) == []


@pytest.mark.parametrize("pattern", [*COVERING, *SECOND_MPI_JOBS, *TORCH, *UNEVEN])
def test_every_pattern_has_tests(pattern: str) -> None:
    file, _, name = pattern.partition("::")
    paths = [path for path in MPI_TESTS.rglob("test_*.py") if _fits(path, file)]
    names = [found for path in paths for found in re.findall(r"def (test_\w+)", path.read_text())]
    assert any(fnmatchcase(found, name or "*") for found in names)


def _fits(path: Path, pattern: str) -> bool:
    return fnmatchcase(str(path.relative_to(MPI_TESTS)), pattern)


def test_files_without_a_chosen_test_are_not_imported() -> None:
    text = (MPI_TESTS / "test_run.py").read_text()
    jobs = "pytestmark = pytest.mark.ranks(1)"
    assert may_choose("fast", "test_a.py", "", size=2)
    assert not may_choose("fast", "test_a.py", "", size=4)
    assert may_choose("fast", "test_a.py", "@pytest.mark.ranks(at_least=4)", size=4)
    assert may_choose("fast", "test_oracle.py", "", size=4)
    assert may_choose("fast", "test_join.py", "", size=3)
    assert may_choose("jobs", "test_a.py", jobs, size=1)
    assert not may_choose("jobs", "test_a.py", "", size=1)
    assert may_choose("second-jobs", "test_run.py", text, size=1)
    assert not may_choose("second-jobs", "test_a.py", jobs, size=1)
    assert may_choose("torch", "test_drop_in.py", "", size=2)
    assert may_choose(None, "test_a.py", "", size=4)


def test_every_marker_is_read_or_admits_two_ranks() -> None:
    for path in MPI_TESTS.rglob("*.py"):
        whole = re.findall(r"mark\.ranks\(([^()]*)\)", path.read_text())
        assert len(whole) == path.read_text().count("mark.ranks"), path
        if not path.name.startswith("test_"):  # files that import it do not show it
            assert all("2" in counts.split(", ") for counts in whole), path


def test_every_choice_of_a_section_is_offered() -> None:
    listed = [each for everything in (False, True) for each in list_sections(everything=everything)]
    for section in (*listed, *list_torch_sections(["2.6.0"])):
        words = section.command
        chosen = [after for word, after in pairwise(words) if word == "--choice"]
        assert set(chosen) <= set(CHOICES), section.name
