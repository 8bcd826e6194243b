"""Whatever a plan, profile or calibration holds: a message that names the file, nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan import read_plan
from dearmpi.plan.model.profile import read_profile
from dearmpi.tune.calibration import read_calibration
from tests.unit.plan.data.test_plan import PLAN, SPECS
from tests.unit.plan.model.test_profile import PROFILE
from tests.unit.tune.test_calibration import made

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "plan": (PLAN.to_json(), read_plan),
    "profile": (PROFILE.to_json(), read_profile),
    "calibration": (made().to_json(), read_calibration),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
HUGE = 10**400  # more than a float holds


def read_or_refuse(kind: str, content: bytes) -> None:
    """What is read can be used; what is not is refused by name; the file stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.json")
        path.write_bytes(content)
        try:
            use(READERS[kind][1](path))
        except ConfigError as error:
            assert str(path) in str(error)
        assert path.read_bytes() == content


def use(found: Any) -> None:
    if hasattr(found, "layout"):
        found.describe()
        try:
            found.layout(SPECS, 4)
        except ConfigError as error:
            assert "plan" in str(error)
    else:
        found.to_json()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in ``value`` that something else can be put at."""
    if not isinstance(value, list | dict):
        return []
    keys = range(len(value)) if isinstance(value, list) else value
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data(), value=JSON)
def test_any_value_may_stand_anywhere(kind: str, data: st.DataObject, value: Any) -> None:
    content = json.loads(READERS[kind][0])
    container, key = data.draw(st.sampled_from(places(content)))
    container[key] = value
    read_or_refuse(kind, json.dumps(content).encode())


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(HUGE, id="huge"),
        pytest.param(-HUGE, id="-huge"),
        1e308,
        [[]],
        {},
        pytest.param("\ud800", id="surrogate"),
        True,
    ],
)
def test_every_value_may_be_replaced(kind: str, value: Any) -> None:
    for index in range(len(places(json.loads(READERS[kind][0])))):
        content = json.loads(READERS[kind][0])
        container, key = places(content)[index]
        container[key] = value
        read_or_refuse(kind, json.dumps(content).encode())


@pytest.mark.parametrize("kind", READERS)
@given(start=st.integers(0, 3000), length=st.integers(0, 50), put=st.binary(max_size=20))
@example(start=0, length=3000, put=b"")
@example(start=0, length=3000, put=b"[" * 20_000)
@example(start=0, length=3000, put=b"1" * 20_000)
def test_a_file_may_be_spoilt_anywhere(kind: str, start: int, length: int, put: bytes) -> None:
    content = bytearray(READERS[kind][0].encode())
    content[start : start + length] = put
    read_or_refuse(kind, bytes(content))
