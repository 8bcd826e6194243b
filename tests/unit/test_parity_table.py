"""docs/reference/parity.md names tests that exist, and all tests of semantics."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "reference" / "parity.md"


def find_tests(*patterns: str) -> set[str]:
    """Names of all test functions in the files that match."""
    return {
        name
        for pattern in patterns
        for path in (ROOT / "tests").glob(pattern)
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), flags=re.MULTILINE)
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
        assert re.search(r"\| (?:`test_\w+`(?:, )?)+ \|$", row), f"no test at the end of: {row}"


def refusals() -> list[str]:
    """What the table says about each case that is refused, without code."""
    rows = re.findall(r"^\| .* \| (✗.*) \| ", TABLE.read_text(), flags=re.MULTILINE)
    return [re.sub(r"`[^`]*`", "", row) for row in rows]


def messages() -> set[str]:
    """All texts in the package's code, {} where something is put in."""
    found = set()
    for path in (ROOT / "dearmpi").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                found.add("".join(map(str, parts)))
    return found


def test_what_is_refused_is_refused_in_these_words() -> None:
    texts = "\0".join(messages())
    assert len(refusals()) > 25
    for row in refusals():
        quotes = re.findall(r'"([^"]+)"', row)
        assert quotes or "named" in row, f"the row does not quote the message: {row}"
        for quote in quotes:
            assert quote in texts, f"no message says {quote!r}, which {TABLE.name} quotes"
