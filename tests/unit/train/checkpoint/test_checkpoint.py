"""A checkpoint is complete or not there, and gives back every bit that went in."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from dearmpi.errors import CheckpointError, UsageError
from dearmpi.train import checkpoint, durable
from dearmpi.train.checkpoint import Snapshot, encoding, part_file, store


def make_snapshot(step: int = 10, *, fill: float = 0.5) -> Snapshot:
    weight = torch.full((4, 3), fill)
    return Snapshot(
        step=step,
        model={"weight": weight, "bias": torch.arange(3.0)},
        optimizer={"weight": {"step": torch.tensor(10.0), "exp_avg": weight * 0.1, "count": 3}},
        groups=[{"lr": 0.1, "betas": (0.9, 0.999), "params": ["weight", "bias"]}],
        meta={"epoch": 2, "world_size": 4},
    )


def content_of(folder: Path) -> dict[str, str]:
    """Every file under ``folder`` with its checksum."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


# What goes in comes out


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8],
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (5, 2)).to(dtype)
    model = {"z": tensor, "empty": torch.empty(0, 3, dtype=dtype), "scalar": tensor[0, 0].clone()}
    loaded = checkpoint.load(
        checkpoint.save(tmp_path, Snapshot(1, model, {"z": {"momentum": tensor}}, [], {}))
    )
    assert list(loaded.model) == ["z", "empty", "scalar"]
    for name, expected in model.items():
        assert loaded.model[name].dtype == dtype
        assert torch.equal(loaded.model[name], expected)
    assert torch.equal(loaded.optimizer["z"]["momentum"], tensor)  # type: ignore[arg-type]


def test_nan_infinity_and_masks_survive(tmp_path: Path) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    mask = torch.tensor([True, False])
    loaded = checkpoint.load(
        checkpoint.save(tmp_path, Snapshot(1, {"v": values, "mask": mask}, {}, [], {}))
    )
    assert loaded.model["v"].view(torch.int32).tolist() == values.view(torch.int32).tolist()
    assert loaded.model["mask"].tolist() == [True, False]


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4)
    model = {"embed": embedding, "other": torch.randn(2), "head": embedding}
    path = checkpoint.save(tmp_path, Snapshot(1, model, {}, [], {}))
    assert set(load_file(path / "part-00000.safetensors")) == {"model/embed", "model/other"}
    loaded = checkpoint.load(path)
    assert loaded.model["head"] is loaded.model["embed"]
    assert torch.equal(loaded.model["head"], embedding)


def test_views_of_one_buffer_are_stored_apart(tmp_path: Path) -> None:
    buffer = torch.arange(12.0)
    model = {
        "first": buffer[:6].view(2, 3),
        "second": buffer[6:],
        "overlap": buffer[4:8],
        "whole": buffer,
        "inner": buffer[1:3],
        "transposed": buffer[:6].view(2, 3).t(),
    }
    loaded = checkpoint.load(checkpoint.save(tmp_path, Snapshot(1, model, {}, [], {})))
    for name, expected in model.items():
        assert torch.equal(loaded.model[name], expected)
    path = tmp_path / "checkpoints/step-00000001/part-00000.safetensors"
    assert path.stat().st_size < 4096 + 40 * 4  # a header of one block, and each element once


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_snapshot())
    loaded = checkpoint.load(path)
    (path / "part-00000.safetensors").write_bytes(b"")
    assert torch.equal(loaded.model["weight"], make_snapshot().model["weight"])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$float", "$tuple", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(value=PLAIN)
def test_plain_values_survive_json_exactly(value: Any) -> None:
    text = json.dumps(encoding.encode(value, where="value"), allow_nan=False)
    # repr tells apart 1 and 1.0, tuples and lists, 0.0 and -0.0, and shows every digit.
    assert repr(encoding.decode(json.loads(text), tensors={})) == repr(value)


def test_float_bits_survive_json() -> None:
    rng = np.random.default_rng(0)
    for bits in rng.integers(0, 2**64, size=2000, dtype=np.uint64):
        value = struct.unpack("<d", struct.pack("<Q", int(bits)))[0]
        if not math.isnan(value):
            stored = json.loads(json.dumps(encoding.encode(value, where="x")))
            assert struct.pack("<d", encoding.decode(stored, tensors={})) == struct.pack(
                "<d", value
            )


def test_options_of_groups_survive(tmp_path: Path) -> None:
    group = {
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "betas": (0.9, 0.999),
        "eps": np.float32(0.1),
        "foreach": None,
        "limit": math.inf,
        "params": ["weight", "bias"],
    }
    snapshot = make_snapshot()
    meta = {"milestones": Counter({30: 1, 60: 2}), "state": (3, (1, 2), None)}
    saved = Snapshot(1, snapshot.model, snapshot.optimizer, [group], meta)
    loaded = checkpoint.load(checkpoint.save(tmp_path, saved))
    assert torch.equal(loaded.groups[0].pop("lr"), group.pop("lr"))  # type: ignore[arg-type]
    assert loaded.groups == [group]
    assert loaded.meta == meta
    assert loaded.optimizer["weight"]["count"] == 3


def test_a_value_that_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    snapshot = Snapshot(1, {}, {}, [], {"task": {"loss": print}})
    with pytest.raises(CheckpointError, match="meta/task/loss is a builtin_function_or_method"):
        checkpoint.save(tmp_path, snapshot)
    assert content_of(tmp_path) == {}
    assert list((tmp_path / "checkpoints").iterdir()) == []


# Optimizer state by name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)))  # type: ignore[no-any-return]


def make_adam(model: Tied, *, swapped: bool = False) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = [
        {"params": [model.last.bias], "lr": 0.01, "betas": (0.8, 0.9)},
        {"params": [*model.first.parameters(), *model.frozen.parameters()]},
    ]
    return torch.optim.Adam(groups[::-1] if swapped else groups, lr=0.1)


def train_step(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Snapshot:
    names = checkpoint.parameter_names(model, optimizer.param_groups)
    state, groups = checkpoint.optimizer_by_name(optimizer.state_dict(), names)
    return Snapshot(step, model.state_dict(), state, groups, {})


def test_a_resumed_optimizer_goes_on_bit_identically(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = make_adam(model)
    for _ in range(3):
        train_step(model, optimizer)
    path = checkpoint.save(tmp_path, take_snapshot(model, optimizer, 3))
    for _ in range(3):
        train_step(model, optimizer)

    torch.manual_seed(1)
    resumed = Tied()
    resumed_optimizer = make_adam(resumed)
    snapshot = checkpoint.load(path)
    checkpoint.check_model(snapshot, resumed.state_dict())
    resumed.load_state_dict(snapshot.model)
    names = checkpoint.parameter_names(resumed, resumed_optimizer.param_groups)
    assert "frozen.weight" in names and "frozen.weight" not in snapshot.optimizer
    resumed_optimizer.load_state_dict(checkpoint.optimizer_state_dict(snapshot, names))
    assert resumed_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for _ in range(3):
        train_step(resumed, resumed_optimizer)
    for name, expected in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], expected), name


def test_state_follows_the_name_when_parameters_come_in_another_order(tmp_path: Path) -> None:
    left, right = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    model = nn.ParameterDict({"left": left, "right": right})
    optimizer = torch.optim.SGD([left, right], lr=0.1, momentum=0.9)
    left.grad, right.grad = torch.full((2,), 1.0), torch.full((2,), 2.0)
    optimizer.step()
    snapshot = take_snapshot(model, optimizer, 1)

    other = torch.optim.SGD([right, left], lr=0.1, momentum=0.9)
    names = checkpoint.parameter_names(model, other.param_groups)
    other.load_state_dict(checkpoint.optimizer_state_dict(snapshot, names))
    assert other.state[left]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert other.state[right]["momentum_buffer"].tolist() == [2.0, 2.0]


def test_groups_divided_otherwise_are_refused() -> None:
    model = Tied()
    snapshot = take_snapshot(model, make_adam(model), 1)
    names = checkpoint.parameter_names(model, make_adam(model, swapped=True).param_groups)
    with pytest.raises(CheckpointError, match=r"last\.bias where the optimizer has first\.weight"):
        checkpoint.optimizer_state_dict(snapshot, names)
    with pytest.raises(CheckpointError, match=r"1 parameters are missing in it \['new'\]"):
        checkpoint.optimizer_state_dict(snapshot, [*names, "new"])


def test_a_foreign_parameter_is_refused() -> None:
    model, foreign = nn.Linear(2, 2), nn.Parameter(torch.zeros(7))
    with pytest.raises(UsageError, match=r"shape \(7,\) that is not the model's"):
        checkpoint.parameter_names(model, torch.optim.SGD([foreign]).param_groups)
    with pytest.raises(UsageError, match="2 parameters, 1 names"):
        checkpoint.optimizer_by_name(torch.optim.SGD(model.parameters()).state_dict(), ["weight"])


# Another model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 2)}, r"weight is \(4, 3\) in the checkpoint, \(4, 2\) in the"),
        ({"weight": torch.zeros(4, 3).double()}, r"weight is torch.float32 .* torch.float64 in"),
        ({"extra": torch.zeros(1)}, "extra is missing in the checkpoint"),
        ({"bias": None}, "bias is not in the model"),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    snapshot = make_snapshot()
    checkpoint.check_model(snapshot, snapshot.model)
    state = {name: t for name, t in (snapshot.model | change).items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_model(snapshot, state)


def test_only_the_first_differences_are_named() -> None:
    state = {f"layer{i}": torch.zeros(1) for i in range(40)}
    with pytest.raises(CheckpointError, match=r"layer4 is missing .*; and 37 more; train with"):
        checkpoint.check_model(make_snapshot(), state)


def test_two_tensors_cannot_be_loaded_into_a_tied_one() -> None:
    one = torch.zeros(2)
    snapshot = Snapshot(1, {"a": torch.zeros(2), "b": torch.ones(2)}, {}, [], {})
    with pytest.raises(CheckpointError, match="b and a are one tensor in the model, two in the"):
        checkpoint.check_model(snapshot, {"a": one, "b": one})
    equal = Snapshot(1, {"a": torch.zeros(2), "b": torch.zeros(2)}, {}, [], {})
    checkpoint.check_model(equal, {"a": one, "b": one})


# Damage


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
    with pytest.raises(CheckpointError, match="version 3, this dearmpi reads version 2; use"):
        checkpoint.load(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        checkpoint.resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint: there are none"):
        checkpoint.resolve(tmp_path)


# Finding, replacing, removing


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


@pytest.mark.parametrize("text", ["checkpoints/step-00000099\n", "", "../../etc", "\0", None])
def test_a_useless_latest_file_is_passed_over(tmp_path: Path, text: str | None) -> None:
    checkpoint.save(tmp_path, make_snapshot(10))
    second = checkpoint.save(tmp_path, make_snapshot(20))
    if text is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(text)
    assert checkpoint.find_latest(tmp_path) == second


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


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_snapshot(10, fill=1.0))
    path = checkpoint.save(tmp_path, make_snapshot(10, fill=2.0))
    assert checkpoint.load(path).model["weight"][0, 0] == 2.0
    assert [p.name for p in path.parent.iterdir()] == ["step-00000010"]


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


class KilledError(BaseException):
    """Stands in for a kill: nothing after it runs, not even clean-up."""


KILL_POINTS = ["write_part", "fsync", "write_text", "rename", "remove"]


@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("step", [10, 20], ids=["same step", "next step"])
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, step: int
) -> None:
    checkpoint.save(tmp_path, make_snapshot(10, fill=1.0))
    for nth in range(8):
        saved = tmp_path / "backup"
        shutil.copytree(tmp_path / "checkpoints", saved / "checkpoints")
        shutil.copy(tmp_path / "latest", saved / "latest")
        with monkeypatch.context() as patch:
            kill_at(patch, point, nth)
            try:
                checkpoint.save(saved, make_snapshot(step, fill=2.0))
                killed = False
            except KilledError:
                killed = True
        found = checkpoint.find_latest(saved)
        assert found is not None
        assert checkpoint.load(found).model["weight"][0, 0] in (1.0, 2.0)
        if step == 20:
            assert (saved / (saved / "latest").read_text().strip()).is_dir()
        path = checkpoint.save(saved, make_snapshot(step, fill=3.0))
        assert checkpoint.load(path).model["weight"][0, 0] == 3.0
        names = {p.name for p in (saved / "checkpoints").iterdir()}
        assert names == {"step-00000010", f"step-{step:08d}"}
        shutil.rmtree(saved)
        if not killed:
            assert nth > 0 or (point == "remove" and step == 20), "the point was never reached"
            return
    pytest.fail("the point was reached more often than was tried")


def kill_at(patch: pytest.MonkeyPatch, point: str, nth: int) -> None:
    """Raise KilledError at the ``nth`` call of ``point``, and stop the clean-up from running."""
    owner: Any = {
        "write_part": part_file,
        "fsync": os,
        "write_text": durable,
        "rename": Path,
        "remove": store,
    }[point]
    original = getattr(owner, point)
    calls = iter(range(1000))

    def kill(*args: Any, **options: Any) -> Any:
        if next(calls) == nth:
            patch.setattr(shutil, "rmtree", lambda *a, **o: None)
            raise KilledError
        return original(*args, **options)

    patch.setattr(owner, point, kill)


# A disk that is full


@pytest.mark.parametrize("point", ["write_part", "fsync", "write_text", "mkdir"])
def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = checkpoint.save(tmp_path, make_snapshot(10))
    before = content_of(tmp_path)
    with monkeypatch.context() as patch:
        owner: Any = {"write_part": part_file, "fsync": os, "mkdir": Path}.get(point, durable)

        def fail(*args: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(owner, point, fail)
        with pytest.raises(CheckpointError, match=r"disk is full .* \d+ are free"):
            checkpoint.save(tmp_path, make_snapshot(20))
    assert content_of(tmp_path) == before
    assert checkpoint.find_latest(tmp_path) == path
    checkpoint.load(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    path = checkpoint.save(small_disk, make_snapshot(10))
    before = content_of(small_disk)
    large = Snapshot(20, {"w": torch.zeros(200_000)}, {}, [], {})
    with pytest.raises(CheckpointError, match="disk is full .*; 800000 bytes are needed") as caught:
        checkpoint.save(small_disk, large)
    assert "step-00000020" in str(caught.value)
    assert content_of(small_disk) == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert checkpoint.save(small_disk, make_snapshot(20)).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot save .*step-00000010: .*File exists"):
        checkpoint.save(tmp_path, make_snapshot(10))
