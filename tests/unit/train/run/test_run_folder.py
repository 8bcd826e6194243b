"""A run folder belongs to one run."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from dearmpi.errors import ConfigError
from dearmpi.train import disk
from dearmpi.train.run.environment import describe_environment, git_commit
from dearmpi.train.run.run_folder import RunFolder, free_name
from tests.codes import raises
from tests.unit.train.locked import refuse_to_look


def test_the_paths_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "first")
    assert folder.path == tmp_path / "runs/first"
    assert folder.log(3).relative_to(folder.path) == Path("logs/rank-00003.log")
    folder.log(3).write_text("the folder of logs exists")
    folder.write_config("lr: 0.1\n")
    folder.write_environment({"world_size": 2})
    assert (folder.path / "config.yaml").read_text() == "lr: 0.1\n"
    assert json.loads((folder.path / "env.json").read_text()) == {"world_size": 2}
    assert RunFolder.open(folder.path) == folder


def test_a_run_is_not_overwritten_but_resumed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with raises(ConfigError, "run-folder-not-empty"):
        RunFolder.create(tmp_path, "run")
    folder.latest.write_text("checkpoints/step-00000007\n")
    with raises(ConfigError, "run-folder-not-empty", "step-00000007", "--resume"):
        RunFolder.create(tmp_path, "run")
    assert RunFolder.create(tmp_path, "run", resume=True) == folder
    assert folder.latest.read_text() == "checkpoints/step-00000007\n"


@pytest.mark.parametrize("content", [b"", b"step", b"\xff\xfe", None])
def test_a_run_whose_latest_cannot_be_read_is_not_overwritten(
    tmp_path: Path, content: bytes | None
) -> None:
    folder = RunFolder.create(tmp_path, "run")
    if content is None:
        folder.latest.mkdir()
    else:
        folder.latest.write_bytes(content)
    with raises(ConfigError, "run-folder-not-empty"):
        RunFolder.create(tmp_path, "run")


def test_one_of_two_runs_that_start_at_once_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "check_free", lambda *_, **__: None)  # both have looked
    RunFolder.create(tmp_path, "run")
    with raises(ConfigError, "run-folder-in-use", "--name"):
        RunFolder.create(tmp_path, "run")


def test_resuming_what_was_never_started_starts_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path, "empty", resume=True).holds_run
    assert RunFolder.create(tmp_path, "new", resume=True).holds_run


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_text("meow")
    for resume, code in ((False, "run-folder-not-empty"), (True, "no-run")):
        with raises(ConfigError, code, "photos"):
            RunFolder.create(tmp_path, "photos", resume=resume)
    assert os.listdir(tmp_path / "photos") == ["cat.png"]
    with raises(ConfigError, "no-run", "photos is"):
        RunFolder.open(tmp_path / "photos")


def test_a_folder_that_may_not_be_looked_at_is_not_called_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RunFolder.create(tmp_path, "run").path
    for locked, told in ((tmp_path, path), (path, path / "metrics.jsonl")):
        with monkeypatch.context() as patch:
            refuse_to_look(locked, patch)
            with raises(ConfigError, "unreadable-file", told):
                RunFolder.open(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_name_that_leaves_the_root_is_refused(tmp_path: Path, name: str) -> None:
    with raises(ConfigError, "malformed-value"):
        RunFolder.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with raises(ConfigError, "unreadable-file"):
        RunFolder.create(tmp_path / "runs", "run")


def test_a_name_by_time_is_free(tmp_path: Path) -> None:
    now = datetime.datetime(2030, 1, 2, 3, 4, 5)
    assert free_name(tmp_path, now) == "20300102-030405"
    for expected in ("20300102-030405", "20300102-030405-2", "20300102-030405-3"):
        assert RunFolder.create(tmp_path, free_name(tmp_path, now)).path.name == expected


def test_a_text_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    disk.write_text(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            disk.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]
    disk.write_text(path, "new\r\n\u00e9")
    assert path.read_bytes() == "new\r\n\u00e9".encode()


def test_the_environment_is_plain_data_without_secrets(tmp_path: Path) -> None:
    environment = describe_environment(
        world_size=2,
        hosts=["a", "b"],
        command=["dear-train", "run"],
        folder=tmp_path,
        threads_reason="as asked for",
        environ={"SLURM_JOB_ID": "17", "API_TOKEN": "hush"},
    )
    text = json.dumps(environment)
    assert environment["job"] == {"SLURM_JOB_ID": "17"}
    assert environment["hosts"] == ["a", "b"]
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["torch_threads"] == torch.get_num_threads()
    assert environment["torch_threads_reason"] == "as asked for"
    assert "hush" not in text


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    # A repository that a surrounding git command names must not be the one that is used.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=clean)
    return result.stdout.strip()


def test_the_commit_is_found_as_git_finds_it(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    repository, worktree = tmp_path / "repository", tmp_path / "worktree"
    repository.mkdir()
    git(repository, "init", "-q")
    assert git_commit(repository) is None
    git(repository, "commit", "-q", "--allow-empty", "-m", "one")
    (repository / "sub").mkdir()
    assert git_commit(repository / "sub") == git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "-q", str(worktree))
    git(worktree, "commit", "-q", "--allow-empty", "-m", "two")
    assert git_commit(worktree) == git(worktree, "rev-parse", "HEAD") != git_commit(repository)
    git(repository, "pack-refs", "--all")
    assert git_commit(worktree) == git(worktree, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "--detach")
    assert git_commit(repository) == git(repository, "rev-parse", "HEAD")
