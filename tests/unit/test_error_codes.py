"""Every error that the package raises has a code with a cause and a cure."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dearmpi import error_codes, errors
from dearmpi.error_codes import CODES
from dearmpi.errors import ConfigError, DearError
from tests.codes import raises

PACKAGE = Path(errors.__file__).parent
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, DearError)
} | {"AgreedError", "Misuse"}


def _made(path: Path) -> Iterator[tuple[int, str | None]]:
    """Line and code of each error that a file makes; None where the call names no code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ERRORS:
            codes = [word.value for word in node.keywords if word.arg == "code"]
            if not codes:
                yield node.lineno, None
            for value in codes:
                for part in ast.walk(value):  # a choice between two codes has both
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield node.lineno, part.value


def _files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "errors.py"]


def test_every_error_is_made_with_a_known_code() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {code or 'no code'}"
        for path in _files()
        for line, code in _made(path)
        if code not in CODES
    ]
    assert not wrong, "\n".join(wrong)


def test_every_code_is_used() -> None:
    text = "\n".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "error_codes.py"
    )
    assert not [code for code in CODES if f'"{code}"' not in text]


@pytest.mark.parametrize("code", CODES)
def test_a_code_has_a_cause_and_a_cure_in_whole_sentences(code: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){0,4}", code)
    for text in (CODES[code].cause, CODES[code].cure):
        assert text.lstrip("`")[0].isalpha() and text[0] == text[0].upper()
        assert text.endswith(".")
        assert all(len(sentence.split()) <= 25 for sentence in text.split(". "))


def test_a_code_travels_with_its_error_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("seed is -1", code="unnamed")))
    with raises(ConfigError, "unnamed", -1):
        raise error


def test_no_code_stands_twice() -> None:
    row = "seed-wrong\n    The seed is wrong.\n    Give another.\n"
    assert list(error_codes._parse(row)) == ["seed-wrong"]
    with pytest.raises(AssertionError, match="twice"):
        error_codes._parse(2 * row)
