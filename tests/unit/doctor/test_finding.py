"""Findings: how they read, and what the command ends with."""

from __future__ import annotations

import pytest

from dearmpi.doctor.finding import Finding, describe, exit_code, fail, ok, summarize, warn

FINDINGS = [
    ok("mpi", "MPICH 5.0"),
    warn("cores", "4 ranks share 2 cores", cure="start at most 2"),
    fail("run folder", "cannot write\nto /data", cure="choose\nanother"),
]


def test_a_cure_stands_below_what_it_cures() -> None:
    assert describe(FINDINGS[0]) == ["[ok]   mpi         MPICH 5.0"]
    assert describe(FINDINGS[1]) == [
        "[warn] cores       4 ranks share 2 cores",
        "                   -> start at most 2",
    ]
    assert describe(FINDINGS[2]) == [
        "[fail] run folder  cannot write",
        "                   to /data",
        "                   -> choose",
        "                      another",
    ]


def test_what_was_found_is_counted() -> None:
    assert summarize(FINDINGS) == "1 failure, 1 warning"
    assert summarize([*FINDINGS, FINDINGS[2]]) == "2 failures, 1 warning"
    assert summarize(FINDINGS[:2]) == "1 warning"
    assert summarize(FINDINGS[:1]) == "all is well"


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ([], 0),
        (["mpi"], 3),
        (["launch"], 3),
        (["software"], 4),
        (["network"], 8),
        (["run folder"], 2),
        (["packages"], 1),
        (["launch", "run folder"], 3),
    ],
)
def test_the_first_failure_gives_the_exit_code(failed: list[str], code: int) -> None:
    findings = [warn("cores", "few", cure="more"), *(fail(n, "no", cure="do") for n in failed)]
    assert exit_code(findings) == code


def test_no_finding_but_a_good_one_goes_without_cure() -> None:
    with pytest.raises(AssertionError):
        Finding("warn", "cores", "few")
    with pytest.raises(AssertionError):
        Finding("ok", "cores", "many", "more")
