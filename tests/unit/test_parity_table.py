"""docs/parity.md names tests that exist, and all tests of semantics."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "parity.md"


def find_tests(*patterns: str) -> set[str]:
    """Names of all test functions in the files that match."""
    return {
        node.name
        for pattern in patterns
        for path in (ROOT / "tests").glob(pattern)
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named_tests() -> set[str]:
    return set(re.findall(r"`(test_\w+)`", TABLE.read_text()))


def test_every_test_in_the_table_exists() -> None:
    missing = named_tests() - find_tests("**/test_*.py")
    assert not missing, f"{TABLE.name} names tests that do not exist: {sorted(missing)}"


def test_every_test_of_semantics_is_in_the_table() -> None:
    missing = find_tests("mpi/test_semantics_*.py") - named_tests()
    assert not missing, f"{TABLE.name} does not name {sorted(missing)}"


def test_every_case_has_a_test() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    cases = [row for row in rows if not re.match(r"\| (\*\*|Case|Defect)", row)]
    assert len(cases) > 50
    for row in cases:
        assert re.search(r"\| `test_\w+` \|$", row), f"no test at the end of: {row}"


def test_what_is_refused_is_tested_as_refused() -> None:
    for row in re.findall(r"^\| .* \| refused.*$", TABLE.read_text(), flags=re.MULTILINE):
        assert '"' in row or "named" in row, f"the row does not quote the message: {row}"
