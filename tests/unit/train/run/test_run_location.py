"""In which folder a run lives, and which checkpoint it goes on from."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError, ConfigError
from dearmpi.train import checkpoint, disk
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import go_back
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.run_location import (
    RunLocation,
    agree_on_location,
    check_shared,
    check_unchanged,
    find_location,
)
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.train.locked import refuse_to_look


def make_run(root: Path, name: str, *steps: int) -> Path:
    for step in steps:
        checkpoint.save(root / name, Snapshot(step, {"w": torch.zeros(1)}, {}, [], {}))
    return root / name


def find(root: Path, **chosen: str) -> RunLocation:
    return find_location({"run_folder": str(root), **chosen}, default_root="runs")


def test_a_new_run_has_the_name_given_or_one_of_its_own(tmp_path: Path) -> None:
    assert find(tmp_path, name="a") == RunLocation(tmp_path, "a")
    assert find(tmp_path).name
    assert find_location({}, default_root="some").root == Path("some")


def test_a_new_run_does_not_take_the_folder_of_another(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 3)
    with raises(ConfigError, "run-folder-not-empty", "step-00000003"):
        find(tmp_path, name="a")


def test_auto_goes_on_where_there_is_a_checkpoint_and_begins_where_there_is_none(
    tmp_path: Path,
) -> None:
    begun = find(tmp_path, name="a", resume="auto")
    assert (begun.checkpoint, begun.continued) == (None, True)
    run = make_run(tmp_path, "a", 3, 6)
    found = find(tmp_path, name="a", resume="auto")
    assert found.checkpoint == run / "checkpoints" / "step-00000006"
    assert found.continued and not found.notes


def test_auto_says_which_checkpoints_it_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    (run / "checkpoints" / "step-00000006" / "part-00000.safetensors").unlink()
    found = find(tmp_path, name="a", resume="auto")
    assert found.checkpoint == run / "checkpoints" / "step-00000003"
    assert "step-00000006" in found.notes[0]


def test_it_says_that_latest_is_damaged_and_what_is_resumed_instead(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    (run / "latest").write_bytes(b"\xff")
    for chosen in ({"resume": "auto", "name": "a"}, {"resume": str(run)}):
        found = find(tmp_path, **chosen)
        assert found.checkpoint == run / "checkpoints" / "step-00000006"
        (note,) = found.notes
        assert note.startswith(f"passed over: {run / 'latest'} holds ")
        assert note.endswith("; resuming from step-00000006")


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{", None])
def test_a_run_whose_beginning_cannot_be_read_does_not_begin_anew(
    tmp_path: Path, content: bytes | None
) -> None:
    begun_from = RunFolder.create(tmp_path, "a").begun_from
    if content is None:
        begun_from.mkdir()
    else:
        begun_from.write_bytes(content)
    with raises(CheckpointError, "unreadable-file", begun_from):
        find(tmp_path, name="a", resume="auto")


def test_auto_does_not_begin_anew_where_no_checkpoint_can_be_read(tmp_path: Path) -> None:
    """What is there may yet be restored, and a new beginning would replace it."""
    run = make_run(tmp_path, "a", 3)
    (run / "checkpoints" / "step-00000003" / "part-00000.safetensors").unlink()
    with raises(CheckpointError, "no-checkpoint"):
        find(tmp_path, name="a", resume="auto")


@pytest.mark.parametrize("name", [{}, {"name": "b"}])
def test_the_best_checkpoint_is_resumed_by_the_file_that_names_it(
    tmp_path: Path, name: dict[str, str]
) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    (run / "best").write_text("checkpoints/step-00000003\n")
    found = find(tmp_path, resume=str(run / "best"), **name)
    assert found.checkpoint == run / "checkpoints" / "step-00000003"
    assert (found.name, found.continued) == (name.get("name", "a"), not name) and not found.notes


def test_a_misspelled_auto_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "no-checkpoint", "'atuo'", "did you mean 'auto'?"):
        find(tmp_path, name="a", resume="atuo")


def test_a_link_to_a_checkpoint_means_the_run_that_has_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3)
    link, copy = tmp_path / "mine" / "checkpoints" / "best", tmp_path / "mine" / "copy"
    link.parent.mkdir(parents=True)
    link.symlink_to(run / "checkpoints" / "step-00000003")
    found = find_location({"resume": str(link)}, default_root="runs")
    assert (found.root, found.name, found.continued) == (tmp_path, "a", True)
    shutil.copytree(link, copy)
    with raises(ConfigError, "resume-unclear", "checkpoints/", "--name"):
        find_location({"resume": str(copy)}, default_root="runs")
    assert find(tmp_path, resume=str(copy), name="b").checkpoint == copy


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_run_that_was_sent_back_by_a_link_goes_on_from_there(tmp_path: Path, place: str) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    link, back = run / place / "best", run / "checkpoints" / "step-00000003"
    link.symlink_to(back)
    sent = find_location({"resume": str(link)}, default_root="runs")
    assert sent.checkpoint is not None
    go_back(run, sent.checkpoint)
    assert find(tmp_path, name="a", resume="auto").checkpoint == back


def test_a_run_that_was_sent_back_goes_on_from_there(tmp_path: Path) -> None:
    """Not from what it has given up, should it fail before its next checkpoint."""
    run = make_run(tmp_path, "a", 3, 6)
    back = run / "checkpoints" / "step-00000003"
    go_back(run, back)
    assert find(tmp_path, name="a", resume="auto").checkpoint == back
    elsewhere = make_run(tmp_path, "b", 6) / "checkpoints" / "step-00000006"
    go_back(run, elsewhere)
    assert find(tmp_path, name="a", resume="auto").checkpoint == back


def test_a_full_disk_is_told_of_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended a run by a full disk is sent back to an earlier checkpoint on it."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = make_run(tmp_path, "a", 3, 6)
    monkeypatch.setattr(disk, "write_text", fail)
    with raises(CheckpointError, "cannot-write", "a/latest"):
        go_back(run, run / "checkpoints" / "step-00000003")
    monkeypatch.setattr(Path, "touch", fail)

    def work(world: World) -> str:
        with pytest.raises(AgreedError) as caught:
            check_shared(world, run)
        return str(caught.value)

    for told in run_ranks(2, work):
        assert told.startswith(f"cannot write {run}/.seen-") and "No space left" in told


def test_a_run_folder_that_a_rank_may_not_look_into_is_not_called_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path, "a").path

    def work(world: World) -> str:
        with pytest.raises(AgreedError) as caught:
            check_shared(world, run)
        return str(caught.value)

    refuse_to_look(run, monkeypatch)
    for told in run_ranks(2, work):
        assert told.startswith(f"cannot look at {run}/.seen-") and "Permission denied" in told
    assert not list(run.glob(".seen-*"))


def test_a_run_that_went_on_while_this_job_was_starting_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3)
    found = find(tmp_path, name="a", resume="auto")
    check_unchanged(found)
    asked_for = find(tmp_path, resume=str(run / "checkpoints" / "step-00000003"))
    make_run(tmp_path, "a", 6)
    with raises(ConfigError, "run-folder-in-use", "step-00000006"):
        check_unchanged(found)
    check_unchanged(asked_for)


def test_so_does_the_path_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    assert not find(tmp_path, resume=str(run)).notes
    (run / "checkpoints" / "step-00000006" / "part-00000.safetensors").unlink()
    for chosen in ({}, {"name": "b"}):
        found = find(tmp_path, resume=str(run), **chosen)
        assert found.checkpoint == run / "checkpoints" / "step-00000003"
        assert "step-00000006" in found.notes[0]
    assert not find(tmp_path, resume=str(found.checkpoint)).notes, "it was asked for"


def test_auto_needs_a_name(tmp_path: Path) -> None:
    with raises(ConfigError, "resume-unclear", "--resume", "--name"):
        find(tmp_path, resume="auto")


def test_a_run_folder_or_a_checkpoint_in_it_is_continued_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3, 6)
    whole = find_location({"resume": str(run)}, default_root="runs")
    early = find_location(
        {"resume": str(run / "checkpoints" / "step-00000003")}, default_root="runs"
    )
    assert (whole.root, whole.name, whole.continued) == (tmp_path, "a", True)
    assert whole.checkpoint == run / "checkpoints" / "step-00000006"
    assert (early.root, early.name, early.continued) == (tmp_path, "a", True)
    assert early.checkpoint == run / "checkpoints" / "step-00000003"


def test_with_a_name_the_checkpoint_begins_another_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3)
    found = find(tmp_path, resume=str(run), name="b")
    assert (found.name, found.continued) == ("b", False)
    with raises(ConfigError, "run-folder-not-empty"):
        find(tmp_path, resume=str(run), name="a")


def test_a_root_may_be_spelt_otherwise_than_the_path_of_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "real", "a", 3)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    through_a_link = str(tmp_path / "link" / "a")
    for resume in (str(run / ".." / "a"), through_a_link):
        assert find(tmp_path / "real", resume=resume).checkpoint is not None
    assert find(tmp_path / "link", resume=str(run)).name == "a"


def test_a_root_that_the_run_is_not_in_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "here", "a", 3)
    with raises(ConfigError, "resume-unclear", "--run-folder"):
        find(tmp_path / "there", resume=str(run))


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, "no-checkpoint"):
        find(tmp_path, resume=str(tmp_path / "nothing"))


def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 3)
    chosen = {"run_folder": str(tmp_path), "name": "a", "resume": "auto"}
    locations = run_ranks(3, lambda world: agree_on_location(world, chosen, default_root="runs"))
    assert set(locations) == {
        RunLocation(
            tmp_path, "a", run / "checkpoints" / "step-00000003", continued=True, goes_on=True
        )
    }


def test_the_command_that_began_a_run_from_another_goes_on_with_it(tmp_path: Path) -> None:
    """As when a scheduler queues a job again, before its first checkpoint or after."""
    other = make_run(tmp_path, "a", 3)
    for resume in (other, other / "checkpoints" / "step-00000003"):
        name = f"from-{resume.name}"
        begun = find(tmp_path, resume=str(resume), name=name)
        assert begun.begun_from is not None and not begun.continued
        RunFolder.create(tmp_path, name).write_begun_from(begun.begun_from)

        make_run(tmp_path, "a", 6)  # the other went on meanwhile
        again = find(tmp_path, resume=str(resume), name=name)
        assert (again.checkpoint, again.continued) == (begun.checkpoint, True)
        make_run(tmp_path, name, 4)
        again = find(tmp_path, resume=str(resume), name=name)
        assert again.checkpoint == tmp_path / name / "checkpoints" / "step-00000004"
        assert again.continued
        with raises(ConfigError, "run-folder-not-empty", "step-00000004"):
            find(tmp_path, resume=str(make_run(tmp_path, "c", 1)), name=name)


def test_auto_goes_on_from_where_a_run_without_a_checkpoint_was_begun(tmp_path: Path) -> None:
    """Not from random weights, which is what a killed run would become without a word."""
    begun = find(tmp_path, resume=str(make_run(tmp_path, "a", 3)), name="b")
    assert begun.begun_from is not None
    RunFolder.create(tmp_path, "b").write_begun_from(begun.begun_from)
    again = find(tmp_path, resume="auto", name="b")
    assert (again.checkpoint, again.begun_from) == (begun.checkpoint, begun.begun_from)
    make_run(tmp_path, "b", 4)
    own = find(tmp_path, resume="auto", name="b")
    assert own.checkpoint == tmp_path / "b" / "checkpoints" / "step-00000004"


def test_a_run_whose_beginning_is_gone_says_so(tmp_path: Path) -> None:
    other = make_run(tmp_path, "a-\udcff", 3)  # a name that is no UTF-8
    begun = find(tmp_path, resume=str(other), name="b")
    assert begun.begun_from is not None
    RunFolder.create(tmp_path, "b").write_begun_from(begun.begun_from)
    make_run(tmp_path, "a-\udcff", 6)
    shutil.rmtree(begun.begun_from)
    for resume in (str(other), "auto"):
        with raises(CheckpointError, "no-checkpoint", "step-00000003", "which is"):
            find(tmp_path, resume=resume, name="b")
    make_run(tmp_path, "b", 4)
    assert find(tmp_path, resume=str(other), name="b").continued


def test_a_run_whose_beginning_may_not_be_looked_at_is_not_told_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_run(tmp_path / "others", "a", 3)
    begun = find(tmp_path, resume=str(other), name="b")
    assert begun.begun_from is not None
    RunFolder.create(tmp_path, "b").write_begun_from(begun.begun_from)
    refuse_to_look(other, monkeypatch)
    with raises(CheckpointError, "unreadable-file", begun.begun_from):
        find(tmp_path, resume="auto", name="b")


def test_a_checkpoint_that_may_not_be_looked_at_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", 3)
    for locked, told in ((tmp_path, run), (run, run / "manifest.json")):
        with monkeypatch.context() as patch:
            refuse_to_look(locked, patch)
            with raises(CheckpointError, "unreadable-file", told):
                find(tmp_path, resume=str(run))


def test_ranks_that_may_not_look_at_the_checkpoint_of_rank_0_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", 3)
    chosen = {"resume": str(run / "checkpoints" / "step-00000003")}
    found = find_location(chosen, default_root="runs")
    monkeypatch.setattr("dearmpi.train.run.run_location.find_location", lambda *_, **__: found)
    refuse_to_look(run, monkeypatch)

    def work(world: World) -> str:
        with pytest.raises(AgreedError) as caught:
            agree_on_location(world, chosen, default_root="runs")
        return str(caught.value)

    for told in run_ranks(2, work):
        assert told.startswith(f"cannot look at {found.checkpoint}: Permission denied")
