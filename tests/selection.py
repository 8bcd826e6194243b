"""Selection: which tests of all ranks `bin/test` runs at which world size.

The number of ranks changes placement, rings and uneven shares, and little else. So each test runs
on two ranks, tests of uneven shares on three as well, and the covering set at every other size and
under a second MPI. tests/README.md says why each of these tests is in the covering set.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

SIZES = (1, 2, 3, 4, 5)
HOME = 2
EVERY_TEST = "slow or not slow"  # the expression of `bin/test --all`

# Files below tests/mpi whose tests run on three ranks as well, where parameters are gathered: what
# is cut into shards, and what is cut anew as parameters come and go or have options of their own.
UNEVEN = (
    "test_semantics_options.py",
    "test_semantics_parameters.py",
    "test_semantics_state.py",
    "collectives/*.py",
)

# Tests that run at every size that they admit, and under Open MPI.
COVERING = (
    "test_oracle.py::test_training_equals_one_process_on_any_number_of_ranks",
    "test_oracle.py::test_optimizers_of_whole_tensors_gather_gradients",
    "test_oracle.py::test_ranks_have_equal_parameters_after_every_step",
    "collectives/test_sums.py::*",
    "collectives/test_half_precision.py::*",
    "collectives/test_dealt_out.py::*",
    "collectives/test_dropped_buffers.py::*",
    "session/test_training.py::test_any_number_of_ranks_trains_what_one_process_trains",
    "session/test_training.py::test_a_run_stopped_on_one_rank_resumes_bit_by_bit",
    "session/test_endings.py::test_a_loss_that_is_nan_on_one_rank_ends_all_at_the_same_step",
    "test_checks.py::*",
    "test_join.py::*",
    "test_progress.py::*",
    "test_plan.py::*",
    "test_staging.py::*",
)

# Of these, four and five ranks run what is of rings and shares: the rest is as on three.
MANY = 4
ON_MANY = ("test_oracle.py::*", "collectives/*", "session/test_training.py::test_any_number_*")

# How a job ends is the library's work too; what a run writes is not, and MPICH's jobs show that.
SECOND_MPI_JOBS = (
    "test_failing_jobs.py::*",
    "test_faults.py::test_one_rank_that_fails_ends_the_job_in_time*",
    "test_faults.py::test_one_rank_killed_from_outside_ends_the_job_in_time",
    "test_faults.py::test_a_rank_that_is_stopped_in_the_finalisation_ends_the_job",
    "test_finalisation.py::*",
    "test_run.py::test_killing_one_rank_ends_the_job_in_time",
)

# What looks into torch most, beside the covering set: for another version of torch.
TORCH = (
    "test_semantics_buffers.py::*",
    "test_semantics_compiled*.py::*",
    "test_drop_in.py::*",
    "test_master_weights.py::*",
)

_MARKER = re.compile(r"mark\.ranks(\([^()]*\))")

# What `--choice` offers.
CHOICES = {
    "ranks": "every test that runs on the ranks of the launcher",
    "jobs": "the tests for one rank alone, which start jobs of their own",
    "fast": "of `ranks`, what this world size adds to the others",
    "second": "of `ranks`, the covering set: for a second MPI, and for ranks without a file",
    "second-jobs": "of `jobs`, those that look at how the MPI ends a job",
    "torch": "of `ranks`, the covering set and what looks into torch most",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """World sizes at which a test can run: ``counts``, or any if empty, from ``at_least`` on."""

    counts: tuple[int, ...] = ()
    at_least: int = 1

    def __contains__(self, size: int) -> bool:
        return size >= self.at_least and (not self.counts or size in self.counts)

    @property
    def is_for_one(self) -> bool:
        """Whether the test runs on one rank alone; such tests start jobs of their own."""
        return self.counts == (1,)

    @property
    def home(self) -> int:
        """The size at which the fast set runs the test: two, or else the smallest."""
        sizes = [size for size in SIZES if size in self]
        return HOME if HOME in sizes or not sizes else sizes[0]


def is_chosen(
    choice: str | None,
    test: str,
    admitted: Admitted,
    *,
    size: int,
    gathers_gradients: bool = False,
) -> bool:
    """Whether ``choice`` has ``test``, such as ``test_a.py::test_b``, on ``size`` ranks.

    gathers_gradients: whether it is the case of a test in which every rank updates all parameters.
    """
    if size not in admitted:
        return False
    match choice:
        case None:
            return True
        case "jobs":
            return admitted.is_for_one
        case "second-jobs":
            return admitted.is_for_one and _is_in(SECOND_MPI_JOBS, test)
        case "second":
            return not admitted.is_for_one and _is_in(COVERING, test)
        case "torch":
            return not admitted.is_for_one and _is_in(COVERING + TORCH, test)
        case "fast":
            is_uneven = size == 3 and not gathers_gradients  # shards are of parameters
            return not admitted.is_for_one and _is_fast(test, admitted, size, is_uneven)
        case _:
            return not admitted.is_for_one


def may_choose(choice: str | None, file: str, text: str, *, size: int) -> bool:
    """Whether ``choice`` may have a test of ``file``, such as ``test_a.py``, which holds ``text``.

    Importing the others would take each of twenty processes seconds.
    """
    admitted = [Admitted(), *map(_read_marker, _MARKER.findall(text))]
    patterns = COVERING + TORCH + SECOND_MPI_JOBS
    tests = [
        f"{file}::",
        *(test for test in patterns if fnmatchcase(file, test.partition("::")[0])),
    ]
    return any(is_chosen(choice, test, each, size=size) for test in tests for each in admitted)


def _read_marker(arguments: str) -> Admitted:
    call = ast.parse(f"ranks{arguments}", mode="eval").body
    assert isinstance(call, ast.Call)
    counts = tuple(ast.literal_eval(count) for count in call.args)
    named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return Admitted(counts, **named)


def _is_fast(test: str, admitted: Admitted, size: int, is_uneven: bool) -> bool:
    if size == admitted.home:
        return True
    if _is_in(COVERING, test) and (size < MANY or _is_in(ON_MANY, test)):
        return True
    file = test.partition("::")[0]
    return is_uneven and _is_in(UNEVEN, file)


def _is_in(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
