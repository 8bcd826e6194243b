"""A damaged checkpoint is named, and left as it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from dearmpi.errors import CheckpointError
from dearmpi.train import checkpoint
from tests.codes import raises
from tests.unit.train.checkpoint.example_snapshot import content_of, flip_byte, make_snapshot


@pytest.mark.parametrize("name", ["part-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_damage_is_named_and_left_as_it_was(tmp_path: Path, name: str, damage: str) -> None:
    older = checkpoint.save(tmp_path, make_snapshot(10))
    path = checkpoint.save(tmp_path, make_snapshot(20))
    file = path / name
    if damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "missing":
        file.unlink()
    else:
        flip_byte(file, file.stat().st_size - 3)
    before = content_of(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert str(file) in message
    assert message.endswith(f"or resume from {older}")
    assert content_of(tmp_path) == before
    if damage == "flipped":
        return
    # What is plainly incomplete is passed over, with the reason.
    found = checkpoint.survey(tmp_path)
    assert found.latest == older
    assert [str(file) in reason for reason in found.passed_over] == [True]


def test_a_flipped_byte_shows_both_checksums(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot())
    expected = json.loads((path / "manifest.json").read_text())["files"]["part-00000.safetensors"]
    flip_byte(path / "part-00000.safetensors", 150)
    actual = hashlib.sha256((path / "part-00000.safetensors").read_bytes()).hexdigest()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    assert f"SHA-256 {actual[:12]}, expected {expected['sha256'][:12]}" in str(caught.value)


def test_no_flipped_byte_of_a_manifest_changes_what_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot())
    file = path / "manifest.json"
    whole = file.read_bytes()
    original = checkpoint.verify(path)
    refused = 0
    for position in range(len(whole)):
        flip_byte(file, position)
        try:
            # A line break may become a tab: white space alone changes nothing.
            assert checkpoint.verify(path) == original
        except CheckpointError:
            refused += 1
        file.write_bytes(whole)
    assert refused > 0.7 * len(whole)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot())
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    body["version"] = 3
    text = json.dumps(body, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body))
    with raises(CheckpointError, "other-format-version", 3, 2):
        checkpoint.load(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, "no-checkpoint", "manifest.json is"):
        checkpoint.load(tmp_path)
    with raises(CheckpointError, "no-checkpoint"):
        checkpoint.resolve(tmp_path / "nowhere")
    with raises(CheckpointError, "no-checkpoint"):
        checkpoint.resolve(tmp_path)
