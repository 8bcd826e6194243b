"""Finding: what one check found, and how findings read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dearmpi.errors import CommError, ConfigError, LaunchError, MismatchError

Status = Literal["ok", "warn", "fail"]

_NAME_WIDTH = 11
_INDENT = " " * (len("[warn] ") + _NAME_WIDTH + 1)
# A failure ends the command with the code that `dear-train run` would end with in its place.
_EXIT_CODES = {
    "mpi": LaunchError.exit_code,
    "launch": LaunchError.exit_code,
    "software": MismatchError.exit_code,
    "network": CommError.exit_code,
    "run folder": ConfigError.exit_code,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check called ``name``.

    said: what is so, with its figures. cure: what to do about it; empty where all is well.
    """

    status: Status
    name: str
    said: str
    cure: str = ""

    def __post_init__(self) -> None:
        assert bool(self.cure) == (self.status != "ok"), (
            f"{self.name}: {self.status}, {self.cure!r}"
        )


def ok(name: str, said: str) -> Finding:
    """All is well."""
    return Finding("ok", name, said)


def warn(name: str, said: str, *, cure: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding("warn", name, said, cure)


def fail(name: str, said: str, *, cure: str) -> Finding:
    """Training cannot work like this."""
    return Finding("fail", name, said, cure)


def describe(finding: Finding) -> list[str]:
    """Lines: status, name and what was found; below it the cure."""
    mark = f"[{finding.status}]".ljust(len("[warn] "))
    first, *more = finding.said.splitlines()
    lines = [f"{mark}{finding.name.ljust(_NAME_WIDTH)} {first}"]
    lines += [_INDENT + line for line in more]
    if finding.cure:
        first, *more = finding.cure.splitlines()
        lines += [f"{_INDENT}-> {first}", *(f"{_INDENT}   {line}" for line in more)]
    return lines


def summarize(findings: Sequence[Finding]) -> str:
    """One line that counts what is wrong."""
    counts = [
        f"{number} {noun}{'' if number == 1 else 's'}"
        for status, noun in (("fail", "failure"), ("warn", "warning"))
        if (number := sum(finding.status == status for finding in findings))
    ]
    return ", ".join(counts) or "all is well"


def exit_code(findings: Sequence[Finding]) -> int:
    """0 unless something failed; then the first failure's."""
    failed = [finding.name for finding in findings if finding.status == "fail"]
    return _EXIT_CODES.get(failed[0], 1) if failed else 0
