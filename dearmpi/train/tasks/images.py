"""images: classification of pictures in a folder with one folder per class."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dearmpi.errors import DataError, TaskError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train.disk import files_below, folders_in, is_folder
from dearmpi.train.tasks.image_models import (
    ImageShape,
    build_vision_model,
    classification_loss,
    classification_metrics,
)
from dearmpi.train.tasks.task import Task, check_at_least, import_extra, read_options

NAME = "images"
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True)
class ImagesOptions:
    """Options of images.

    data: folder of class folders, or of ``train`` and ``val`` with the same class folders each.
    model: see build_vision_model. size: pictures are scaled to size x size.
    val_fraction: held out of each class where there is no ``val`` folder.
    """

    data: str
    model: str = "small"
    size: int = 64
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_at_least(NAME, "size", self.size, 8)
        if not 0 <= self.val_fraction <= 0.9:
            raise TaskError(
                f"task {NAME}: option val_fraction is {self.val_fraction}; it must be 0 to 0.9",
                code="out-of-range",
            )


@dataclass(frozen=True, slots=True)
class Pictures:
    """Image files with their class numbers, each read when it is indexed."""

    files: Sequence[Path]
    labels: Sequence[int]
    size: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_picture(self.files[index], self.size), self.labels[index]


def build_images(options: Mapping[str, str]) -> Task:
    """The task; see ImagesOptions. Raises TaskError for options and a missing Pillow, DataError
    for folders without classes or pictures.
    """
    chosen = _read_options(options)
    import_extra("PIL.Image", library="Pillow", extra="images", needed_by=f"task {NAME}")
    root = Path(chosen.data)
    classes, train, held_out = _scan(root, chosen)
    shape = ImageShape(size=chosen.size, num_classes=len(classes))
    return Task(
        name=NAME,
        model=build_vision_model(chosen.model, shape, needed_by=f"task {NAME}"),
        train_data=train,
        eval_data=held_out if len(held_out) else None,
        loss=classification_loss,
        metrics=classification_metrics,
        unit="images",
        data_digest=_digest(root, train, held_out),
        notes=[
            f"images: {len(train)} to train on, {len(held_out)} held out, "
            f"{len(classes)} classes, model {chosen.model}"
        ],
        defaults={
            "optimizer": "AdamW",
            "lr": 1e-3,
            "batch_size": 32,
            "epochs": 10,
            "warmup_steps": 50,
            "weight_decay": 0.05,
            "lr_schedule": "cosine",
            "max_grad_norm": 1.0,
        },
    )


def _read_options(options: Mapping[str, str]) -> ImagesOptions:
    if "data" not in options:
        raise TaskError(
            f"task {NAME} needs a folder with one folder per class: --data FOLDER",
            code="file-missing",
        )
    chosen = read_options(ImagesOptions, options, task=NAME)
    if "val_fraction" in options and _is_divided(Path(chosen.data)):
        raise TaskError(
            f"task {NAME}: option val_fraction has no effect, since {chosen.data} has a folder "
            "val; leave it out",
            code="setting-without-effect",
        )
    return chosen


def read_picture(path: Path, size: int) -> Tensor:
    """An image file as fp32 (3, size, size), scaled, its values between -1 and 1.

    Raises DataError naming the file where it cannot be read.
    """
    image_module = import_extra(
        "PIL.Image", library="Pillow", extra="images", needed_by=f"task {NAME}"
    )
    try:
        with image_module.open(regular_file(path)) as picture:
            mode = picture.mode
            scaled = picture.convert("RGB").resize((size, size))
    except Exception as error:
        raise DataError(
            f"cannot read image {path}: {type(error).__name__}: {error}; repair or replace it: "
            "a resumed run needs the same files",
            code="sample-unreadable",
        ) from error
    if mode.startswith(("I", "F")):  # what is above 255 would all be white
        raise DataError(
            f"image {path} has more than 8 bits per channel (mode {mode}); convert it to 8 bits",
            code="sample-unreadable",
        )
    pixels = torch.from_numpy(np.array(scaled, dtype=np.float32))
    return pixels.permute(2, 0, 1).contiguous() / 127.5 - 1


def _scan(root: Path, options: ImagesOptions) -> tuple[list[str], Pictures, Pictures]:
    """Class names, pictures to train on, pictures held out."""
    if _is_divided(root):
        train, held_out = _class_files(root / "train"), _class_files(root / "val")
        if train.keys() != held_out.keys():
            only = sorted(train.keys() ^ held_out.keys())
            raise DataError(
                f"{root / 'train'} and {root / 'val'} have different class folders: "
                f"{', '.join(only[:8])} in one of them only ({len(only)} in all)",
                code="data-misplaced",
            )
    else:
        _check_undivided(root)
        every = _class_files(root)
        cuts = {name: _spread(files, options.val_fraction) for name, files in every.items()}
        train = {name: kept for name, (kept, _) in cuts.items()}
        held_out = {name: out for name, (_, out) in cuts.items()}
    classes = list(train)
    if len(classes) < 2:
        raise DataError(
            f"{root} has 1 class folder ({classes[0]}); at least 2 are needed",
            code="data-insufficient",
        )
    return classes, _pictures(train, options.size), _pictures(held_out, options.size)


def _is_divided(root: Path) -> bool:
    """Whether ``root`` has folders ``train`` and ``val``."""
    return is_folder(root / "train", DataError) and is_folder(root / "val", DataError)


def _check_undivided(root: Path) -> None:
    """Raise DataError where ``train`` would become a class: it holds folders, a class holds
    pictures.
    """
    if is_folder(root / "train", DataError) and folders_in(root / "train"):
        others = sorted(p.name for p in folders_in(root) if p.name != "train")
        raise DataError(
            f"{root} has a folder train but no folder val (beside train: "
            f"{', '.join(others) or 'nothing'}); rename one of them to val, or give "
            f"{root / 'train'}, so that val_fraction of it is held out",
            code="data-misplaced",
        )


def _class_files(root: Path) -> dict[str, list[Path]]:
    """Sorted image files of each class folder of ``root``, by class name. Hidden files and folders,
    which some systems create beside pictures, are skipped.
    """
    if not is_folder(root, DataError):
        raise DataError(
            f"there is no folder {root}; give a folder with one folder per class",
            code="file-missing",
        )
    folders = folders_in(root)
    if not folders:
        raise DataError(
            f"{root} has no class folders; put the pictures of each class into a "
            "folder named for the class",
            code="data-insufficient",
        )
    found = {}
    for folder in folders:
        files = sorted(p for p in files_below(folder) if p.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(
                f"class folder {folder} holds no images (known endings: "
                f"{', '.join(sorted(SUFFIXES))}); fill it or remove it",
                code="data-insufficient",
            )
        found[folder.name] = files
    return found


def _digest(root: Path, train: Pictures, held_out: Pictures) -> str:
    """Which files are trained on and which are held out, by name: eight hexadecimal digits."""
    found = hashlib.sha256()
    for part in (train, held_out):
        for file, label in zip(part.files, part.labels, strict=True):
            found.update(
                f"{label} {file.relative_to(root).as_posix()}\0".encode(errors="surrogateescape")
            )
        found.update(b"\0")
    return found.hexdigest()[:8]


def _spread(files: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """Cut ``files`` into kept files and held-out files, the latter evenly spread."""
    num_out = int(len(files) * fraction)
    places = {(2 * i + 1) * len(files) // (2 * num_out) for i in range(num_out)}
    kept = [file for place, file in enumerate(files) if place not in places]
    return kept, [files[place] for place in sorted(places)]


def _pictures(by_class: Mapping[str, Sequence[Path]], size: int) -> Pictures:
    files = [file for of_class in by_class.values() for file in of_class]
    labels = [label for label, of_class in enumerate(by_class.values()) for _ in of_class]
    return Pictures(files=files, labels=labels, size=size)
