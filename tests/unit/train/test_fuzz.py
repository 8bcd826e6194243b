"""Whatever a file or a name holds, there is a message, no other exception, and nothing changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dearmpi.errors import CheckpointError, ConfigError, DearError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import Snapshot
from dearmpi.train.checkpoint.manifest import record_file
from dearmpi.train.settings.settings import SETTINGS
from dearmpi.train.settings.sources import read_file, resolve
from dearmpi.train.tasks.task_registry import build_task

PART = "part-00000.safetensors"
FIELDS = ["step", "serial", "written", "files", "model", "aliases", "groups", "meta", "version"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | st.sampled_from(["$tensor", "$dict", "../x", "weight"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tensor", "$dict", PART]), inner,
                      max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = torch.arange(12.0).view(3, 4)
    snapshot = Snapshot(
        step=5,
        model={"weight": weight, "bias": torch.ones(3)},
        optimizer={"weight": {"step": torch.tensor(5.0), "exp_avg": weight / 2}},
        groups=[{"lr": 0.1, "betas": (0.9, 0.99), "params": ["weight", "bias"]}],
        meta={"epoch": 1, "config": {"task": "digits"}},
    )
    return checkpoint.save(tmp_path_factory.mktemp("good"), snapshot)


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A checkpoint that may be spoilt, in a run folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "checkpoints", path.name)
        shutil.copytree(path, target)
        yield target


def sign(path: Path, body: dict[str, Any]) -> None:
    """Write ``body`` as a manifest whose checksum is right."""
    body.pop("sha256", None)
    text = json.dumps(body, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body))


def load_or_refuse(path: Path) -> None:
    """Loading gives a snapshot or a message that names the folder, and changes nothing."""
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    try:
        checkpoint.load(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    checkpoint.survey(path.parent.parent)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


@given(name=st.sampled_from([PART, "manifest.json"]), data=st.data())
def test_spoilt_bytes_are_never_loaded(good: Path, name: str, data: st.DataObject) -> None:
    with copied(good) as path:
        content = bytearray((path / name).read_bytes())
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=50))
        (path / name).write_bytes(content)
        load_or_refuse(path)


@given(field=st.sampled_from(FIELDS), value=JSON)
@example(field="files", value={"../secret": {"bytes": 1, "sha256": ""}})
@example(field="files", value={PART: {"bytes": "1", "sha256": ""}})
@example(field="files", value={})
@example(field="groups", value=[{"$tensor": "nothing"}])
@example(field="aliases", value={"weight": "nothing"})
def test_a_manifest_with_a_right_checksum_may_hold_anything(
    good: Path, field: str, value: Any
) -> None:
    with copied(good) as path:
        body = json.loads((path / "manifest.json").read_text())
        body[field] = value
        sign(path, body)
        load_or_refuse(path)


@given(key=st.sampled_from(["pieces", "optimizer", "random", "all"]), value=JSON)
@example(key="pieces", value={"model/weight": [0, [3], [1]]})
@example(key="pieces", value={"model/weight": [9, [3, 4], [4, 1]]})
@example(key="pieces", value={"model/weight": [0, [-3, -4], [4, 1]]})
def test_a_part_with_a_right_checksum_may_hold_anything(good: Path, key: str, value: Any) -> None:
    with copied(good) as path:
        content = (path / PART).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        about = json.loads(header["__metadata__"]["dearmpi"])
        about = value if key == "all" else {**about, key: value}
        header["__metadata__"]["dearmpi"] = json.dumps(about)
        text = json.dumps(header).encode()
        (path / PART).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        body = json.loads((path / "manifest.json").read_text())
        record = record_file(path / PART)
        body["files"][PART] = {"bytes": record.bytes, "sha256": record.sha256}
        sign(path, body)
        load_or_refuse(path)


CONFIGS = st.binary(max_size=60) | st.dictionaries(
    st.sampled_from(sorted(SETTINGS)) | st.text(max_size=4), JSON, max_size=4
).map(lambda content: yaml.safe_dump(content).encode())


@given(content=CONFIGS)
@example(content=b"2026-99-99: 1")
@example(content=b"a: &x [*x]")
@example(content=b"[" * 5000)
@example(content=b"? [1, 2]\n: 3")
def test_a_config_file_may_hold_anything(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_bytes(content)
        try:
            resolve([read_file(path)])
        except ConfigError as error:
            assert str(error)
        assert path.read_bytes() == content and len(list(Path(folder).iterdir())) == 1


@given(name=st.text(max_size=12) | st.text(alphabet=":./\0 py" + string.ascii_letters, max_size=9))
@example(name="\0:f")
@example(name="a\0.py:f")
@example(name="..:f")
@example(name=".a:f")
@example(name="synthetic:")
@example(name="x" * 5000 + ".py:f")
@example(name="~nobody/x.py:f")
def test_a_task_may_be_called_anything(name: str) -> None:
    with pytest.raises(DearError):
        build_task(name, {"no such option": "1"})
