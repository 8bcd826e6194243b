"""images: class folders, their split, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dearmpi.errors import DataError, TaskError
from dearmpi.train.data.data import load_batch
from dearmpi.train.tasks.images import Pictures, build_images, read_picture
from tests.codes import raises
from tests.unit.train.locked import refuse_to_list

image_module = pytest.importorskip("PIL.Image")


def paint(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image_module.new("RGB", (20, 12), colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten red and ten blue pictures, each class in its folder."""
    for number in range(10):
        paint(tmp_path / "red" / f"{number}.png", (200 + number, 0, 0))
        paint(tmp_path / "blue" / f"{number}.jpg", (0, 0, 200 + number))
    return tmp_path


def pictures(data: object) -> Pictures:
    assert isinstance(data, Pictures)
    return data


def test_each_class_is_split_alike_and_every_picture_used_once(folder: Path) -> None:
    task = build_images({"data": str(folder), "size": "8", "val_fraction": "0.2"})
    train, held_out = pictures(task.train_data), pictures(task.eval_data)
    assert len(train) == 16
    assert sorted(held_out.labels) == [0, 0, 1, 1]
    assert len({*train.files, *held_out.files}) == 20
    assert (
        held_out.files
        == pictures(build_images({"data": str(folder), "val_fraction": "0.2"}).eval_data).files
    )


def test_classes_are_numbered_in_the_order_of_their_names(folder: Path) -> None:
    train = pictures(build_images({"data": str(folder)}).train_data)
    assert {
        (file.parent.name, label) for file, label in zip(train.files, train.labels, strict=True)
    } == {("blue", 0), ("red", 1)}


def test_train_and_val_folders_are_used_as_they_are(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        for name in ("red", "blue"):
            for part in ("train", "val")[: 1 + (number == 0)]:
                paint(tmp_path / "data" / part / name / f"{number}.png", (0, number, 0))
    task = build_images({"data": str(tmp_path / "data")})
    assert len(task.train_data) == 6
    assert task.eval_data is not None
    assert len(task.eval_data) == 2
    with raises(TaskError, "setting-without-effect", "val_fraction"):
        build_images({"data": str(tmp_path / "data"), "val_fraction": "0.3"})


def test_nothing_is_held_out_where_nothing_is_asked_for(folder: Path) -> None:
    assert build_images({"data": str(folder), "val_fraction": "0"}).eval_data is None


def test_a_picture_is_scaled_with_values_from_minus_one_to_one(tmp_path: Path) -> None:
    paint(tmp_path / "red.png", (255, 0, 0))
    picture = read_picture(tmp_path / "red.png", 16)
    assert picture.shape == (3, 16, 16)
    assert picture.dtype == torch.float32
    assert [channel.unique().tolist() for channel in picture] == [[1], [-1], [-1]]


def test_the_small_network_learns_colours(folder: Path) -> None:
    torch.manual_seed(0)
    task = build_images({"data": str(folder), "size": "8", "val_fraction": "0"})
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    batch = load_batch(task, task.train_data, tuple(range(20)))
    for _ in range(30):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(task.model, batch))
        optimizer.step()
    assert task.metrics is not None
    assert task.metrics(task.model, batch) == {"accuracy": 20}


def test_a_damaged_picture_is_named_when_it_is_read(folder: Path) -> None:
    bad = folder / "red" / "5.png"
    bad.write_bytes(bad.read_bytes()[:40])
    task = build_images({"data": str(folder), "val_fraction": "0"})
    index = list(pictures(task.train_data).files).index(bad)
    with raises(DataError, "sample-unreadable", bad):
        load_batch(task, task.train_data, (index,))


def test_a_picture_taken_away_makes_it_other_data(tmp_path: Path) -> None:
    """Of 20 pictures 18 are trained on, and of 19 as well, but others."""
    for number in range(20):
        for name in ("red", "blue"):
            paint(tmp_path / "before" / name / f"{number}.png", (1, 0, 0))
    task = build_images({"data": str(tmp_path / "before")})
    moved = (tmp_path / "before").rename(tmp_path / "after")
    assert build_images({"data": str(moved)}).data_digest == task.data_digest
    (moved / "red" / "7.png").unlink()
    fewer = build_images({"data": str(moved)})
    assert len(fewer.train_data) == len(task.train_data)
    assert fewer.data_digest != task.data_digest


def test_hidden_files_are_no_pictures(folder: Path) -> None:
    (folder / "red" / "._3.png").write_bytes(b"made by a file manager")
    (folder / "red" / ".AppleDouble").mkdir()
    (folder / "red" / ".AppleDouble" / "3.png").write_bytes(b"made by a file server")
    task = build_images({"data": str(folder), "val_fraction": "0"})
    assert len(task.train_data) == 20


def test_a_picture_of_more_than_8_bits_is_refused(tmp_path: Path) -> None:
    image_module.new("I;16", (20, 12), 4000).save(tmp_path / "grey.png")
    with raises(DataError, "sample-unreadable", "grey.png", 8, "I;16"):
        read_picture(tmp_path / "grey.png", 8)


def test_a_class_without_pictures_is_named(folder: Path) -> None:
    (folder / "green").mkdir()
    (folder / "green" / "notes.txt").write_text("no picture")
    with raises(DataError, "data-insufficient", folder / "green"):
        build_images({"data": str(folder)})


def test_pictures_in_a_folder_that_may_not_be_listed_are_not_left_out_in_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = folder / "red" / "more"
    paint(locked / "0.png", (1, 0, 0))
    refuse_to_list(locked, monkeypatch)
    with raises(DataError, "unreadable-file", locked):
        build_images({"data": str(folder)})


def test_a_folder_that_may_not_be_looked_at_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 300)
    with raises(DataError, "unreadable-file", path):
        build_images({"data": str(path)})


def test_a_folder_without_classes_is_named(tmp_path: Path) -> None:
    with raises(DataError, "data-insufficient", tmp_path):
        build_images({"data": str(tmp_path)})


def test_a_single_class_is_not_enough(tmp_path: Path) -> None:
    paint(tmp_path / "red" / "0.png", (1, 0, 0))
    with raises(DataError, "data-insufficient", 1, 2):
        build_images({"data": str(tmp_path)})


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with raises(DataError, "file-missing", tmp_path / "nowhere"):
        build_images({"data": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("other", ["test", "valid", "validation"])
def test_a_division_by_other_names_is_not_taken_for_classes(tmp_path: Path, other: str) -> None:
    for place in ("train/red", "train/blue", f"{other}/red", f"{other}/blue"):
        paint(tmp_path / place / "0.png", (1, 0, 0))
    with raises(DataError, "data-misplaced", other):
        build_images({"data": str(tmp_path)})


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for place in ("train", "bus"):
        paint(tmp_path / place / "0.png", (1, 0, 0))
    assert len(build_images({"data": str(tmp_path)}).train_data) == 2


def test_classes_that_only_one_part_has_are_named(tmp_path: Path) -> None:
    for place in ("train/red", "train/blue", "val/red"):
        paint(tmp_path / place / "0.png", (1, 0, 0))
    with raises(DataError, "data-misplaced", "(1 in all)"):
        build_images({"data": str(tmp_path)})


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"model": "smal"}, ("unknown-choice", "'smal'", "'small'")),
        ({"model": "torchvison:resnet18"}, ("unknown-choice", "'torchvision:NAME'")),
        ({"val_fraction": "1.5"}, ("out-of-range", "val_fraction is", "1.5")),
        ({"size": "2"}, ("out-of-range", "size is", "2", "8")),
    ],
)
def test_bad_options_are_refused(
    folder: Path, options: dict[str, str], refused: tuple[str, ...]
) -> None:
    with raises(TaskError, *refused):
        build_images({"data": str(folder), **options})


def test_a_missing_data_option_asks_for_a_folder() -> None:
    with raises(TaskError, "file-missing", "--data"):
        build_images({})


def test_without_pillow_it_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with raises(TaskError, "library-missing", "'dearmpi[images]'"):
        build_images({"data": str(folder)})
