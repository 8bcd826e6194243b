"""Which checkpoint is found, replaced and removed."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from dearmpi.errors import CheckpointError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import manifest
from tests.codes import raises
from tests.unit.train.checkpoint.example_snapshot import make_snapshot


def test_no_checkpoint_is_found_in_a_new_run(tmp_path: Path) -> None:
    assert checkpoint.find_latest(tmp_path) is None
    assert checkpoint.survey(tmp_path).passed_over == ()


def test_the_latest_file_decides(tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, make_snapshot(10))
    second = checkpoint.save(tmp_path, make_snapshot(20))
    assert (tmp_path / "latest").read_text() == "checkpoints/step-00000020\n"
    assert checkpoint.find_latest(tmp_path) == second
    (tmp_path / "latest").write_text("checkpoints/step-00000010\n")
    assert checkpoint.find_latest(tmp_path) == checkpoint.resolve(tmp_path) == first
    assert checkpoint.resolve(second) == second


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"checkpoints/step-00000099\n", "names step-00000099, which does not exist"),
        (b"checkpoints/step-00000001\n", "names step-00000001, which does not exist"),
        (b"", "holds '', which names no checkpoint"),
        (b"../../etc", "holds '../../etc', which names no checkpoint"),
        (b"\0" * 500, "...', which names no checkpoint"),
        (b"\xff\xfe", "which names no checkpoint"),
        (None, "there is no "),
    ],
)
def test_a_useless_latest_file_is_passed_over_and_told(
    tmp_path: Path, text: bytes | None, told: str
) -> None:
    checkpoint.save(tmp_path, make_snapshot(10))
    second = checkpoint.save(tmp_path, make_snapshot(20))
    pointer = tmp_path / "latest"
    pointer.unlink()
    if text is not None:
        pointer.write_bytes(text)
    found = checkpoint.survey(tmp_path)
    assert found.latest == second
    (reason,) = found.passed_over
    assert str(pointer) in reason and told in reason and len(reason) < len(str(pointer)) + 250


def test_a_damaged_checkpoint_is_told_where_latest_names_it_however_old(tmp_path: Path) -> None:
    """To which the run was sent back."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, make_snapshot(step))
    for step in (10, 20):
        (tmp_path / f"checkpoints/step-000000{step}/part-00000.safetensors").unlink()
    (tmp_path / "latest").write_text("checkpoints/step-00000020\n")
    found = checkpoint.survey(tmp_path)
    assert found.latest is not None and found.latest.name == "step-00000030"
    (reason,) = found.passed_over
    assert "step-00000020" in reason


def test_the_first_checkpoint_may_be_there_before_latest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_snapshot(10))
    (tmp_path / "latest").unlink()
    assert checkpoint.survey(tmp_path).passed_over == ()


def test_a_latest_that_is_no_file_says_what_to_do(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_snapshot(10))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with raises(CheckpointError, "unreadable-file"):
        checkpoint.survey(tmp_path)


def test_what_was_written_last_is_newest_even_after_going_back(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15):
        checkpoint.save(tmp_path, make_snapshot(step))
    (tmp_path / "latest").unlink()
    found = checkpoint.find_latest(tmp_path)
    assert found is not None and found.name == "step-00000015"
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000015",
        "step-00000030",
    ]


def test_pruning_keeps_the_last_and_the_one_to_resume_from(tmp_path: Path) -> None:
    paths = [checkpoint.save(tmp_path, make_snapshot(step)) for step in (1, 2, 3, 4, 5)]
    (tmp_path / "latest").write_text("checkpoints/step-00000002\n")
    (paths[2] / "part-00000.safetensors").unlink()
    assert checkpoint.prune(tmp_path, keep=1) == (paths[0], paths[3])
    assert [p.exists() for p in paths] == [False, True, True, False, True]
    assert checkpoint.prune(tmp_path, keep=5) == ()


def test_pruning_reads_nothing_while_there_are_not_too_many_and_then_each_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait for it at each save, and it may be on a slow network file system."""
    paths = [checkpoint.save(tmp_path, make_snapshot(step)) for step in (1, 2, 3)]
    read, asked = manifest.read_manifest, []

    def note(path: Path) -> manifest.Manifest:
        asked.append(path)
        return read(path)

    monkeypatch.setattr(manifest, "read_manifest", note)
    assert checkpoint.prune(tmp_path, keep=3) == () and asked == []
    assert checkpoint.prune(tmp_path, keep=2) == (paths[0],) and asked == paths


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_snapshot(10, fill=1.0))
    path = checkpoint.save(tmp_path, make_snapshot(10, fill=2.0))
    assert checkpoint.load(path).model["weight"][0, 0] == 2.0
    assert [p.name for p in path.parent.iterdir()] == ["step-00000010"]


def test_what_was_replaced_and_is_still_in_use_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a folder with a file that somebody reads cannot be removed."""
    path = checkpoint.save(tmp_path, make_snapshot(10, fill=1.0))

    def in_use(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", folder.name)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", in_use)
        for fill in (2.0, 3.0):
            with pytest.warns(UserWarning, match="left over: .*step-00000010.*; remove it"):
                assert checkpoint.save(tmp_path, make_snapshot(10, fill=fill)) == path
            assert checkpoint.find_latest(tmp_path) == path
            assert checkpoint.load(path).model["weight"][0, 0] == fill
        shutil.copytree(path, path.with_name(path.name + ".replaced"))
        last = checkpoint.save(tmp_path, make_snapshot(20))
        assert checkpoint.prune(tmp_path, keep=2) == ()
    checkpoint.save(tmp_path, make_snapshot(20))
    assert sorted(path.parent.iterdir()) == [path, last]


def test_what_a_killed_writer_left_and_is_still_in_use_costs_no_other_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, make_snapshot(10))
    left = path.with_name(".writing-step-00000020")
    shutil.copytree(path, left)
    remove = shutil.rmtree

    def in_use(folder: Path, ignore_errors: bool = False) -> None:
        if folder != left:
            remove(folder, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", folder.name)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", in_use)
        checkpoint.save(tmp_path, make_snapshot(15))
        with raises(CheckpointError, "cannot-write"):
            checkpoint.save(tmp_path, make_snapshot(20))
    checkpoint.save(tmp_path, make_snapshot(20))
    assert not left.exists()


def test_what_a_killed_writer_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot(10))
    for name in (".writing-step-00000007", ".removing-step-00000003"):
        shutil.copytree(path, path.parent / name)
    assert checkpoint.survey(tmp_path) == checkpoint.Survey(path, ())
    last = checkpoint.save(tmp_path, make_snapshot(20))
    assert sorted(path.parent.iterdir()) == [path, last]


def test_a_checkpoint_that_was_to_be_replaced_serves_until_it_is(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot(10))
    aside = path.rename(path.with_name(path.name + ".replaced"))
    found = checkpoint.survey(tmp_path)
    assert found.latest == aside
    assert "names step-00000010, which does not exist" in found.passed_over[0]
    assert checkpoint.load(aside).step == 10
    last = checkpoint.save(tmp_path, make_snapshot(20))
    assert sorted(path.parent.iterdir()) == [aside, last]
    checkpoint.save(tmp_path, make_snapshot(10))
    assert sorted(path.parent.iterdir()) == [path, last]
