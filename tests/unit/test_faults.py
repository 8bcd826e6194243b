"""The table of faults stays true: tests/faults/run.py takes minutes and is run by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.table import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_put_in_and_its_tests_exist(fault: Fault) -> None:
    text = (ROOT / "dearmpi" / fault.file).read_text()
    assert text.count(fault.old) == 1
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file()
        assert f"def {name}" in (ROOT / path).read_text()
