"""The scripts in benchmarks/ are run by hand: what they import must be there all the same."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_the_package_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dearmpi"):
            continue
        assert node.module is not None
        module = import_module(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                import_module(f"{node.module}.{alias.name}")
