"""Task names: which there are, told without torch, for commands that train nothing."""

from __future__ import annotations

from dearmpi.config import known_names
from dearmpi.errors import TaskError

BUILT_IN = ("bytes-lm", "digits", "images")
SYNTHETIC = "synthetic"
SYNTHETIC_MODELS = ("bert-base", "bert-large", "resnet50")
LIBRARIES = ("torchvision", "timm", "transformers")
TASK_FORMS = (
    *BUILT_IN,
    f"{SYNTHETIC}:NAME",
    "package.module:function",
    "path/to/file.py:function",
)


def check_task_name(name: str) -> None:
    """Raise TaskError for a name that no task can have; looks at no file and no module."""
    kind, colon, rest = name.partition(":")
    if name in BUILT_IN:
        return
    if kind == SYNTHETIC:
        if rest not in SYNTHETIC_MODELS and rest.partition(":")[0] not in LIBRARIES:
            known = [*SYNTHETIC_MODELS, *(f"{library}:NAME" for library in LIBRARIES)]
            raise TaskError(f"there is no task {SYNTHETIC}:{rest}{known_names(rest, known)}")
    elif colon or name.endswith(".py"):
        place, _, attribute = name.rpartition(":")
        if not place or not attribute:
            raise TaskError(f"task {name!r} names no function; write {name.strip(':')}:FUNCTION")
    else:
        raise TaskError(f"there is no task {name!r}{known_names(name, TASK_FORMS)}")
