"""Tasks of one's own: found, called, and explained when they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dearmpi.errors import DataError, TaskError
from dearmpi.train.data.data import Batches, load_batch
from dearmpi.train.tasks.task_registry import build_task
from tests.codes import raises

GOOD = """
from dataclasses import dataclass
from torch import nn
from dearmpi.train.tasks.task import Task

@dataclass
class Note:
    text: "str"

def loss(model, batch):
    return model(batch).mean()

def build(options):
    return Task(name=options.get("name", "mine"), model=nn.Linear(2, 1), loss=loss,
                train_data=[[0.0, 1.0]] * 4, notes=[Note("hello").text])
"""
DOCUMENT = Path(__file__).parents[4] / "docs" / "how-to" / "tasks.md"


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    """Modules that a test wrote are forgotten after it."""
    yield
    for name in list(sys.modules):
        if name.startswith(("my_package", "beside", "dearmpi_task_")):
            del sys.modules[name]


def test_a_file_is_loaded_and_its_function_called_with_the_options(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", GOOD)
    task = build_task(f"{path}:build", {"name": "given"})
    assert task.name == "given"
    assert list(task.notes) == ["hello"]


def test_loading_a_file_leaves_the_path_and_other_modules_of_its_name_alone(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "json.py", GOOD)
    before, modules, json = list(sys.path), set(sys.modules), sys.modules["json"]
    build_task(f"{path}:build", {})
    assert sys.path == before
    assert sys.modules["json"] is json
    (added,) = (name for name in set(sys.modules) - modules if "json" in name)
    assert added.startswith("dearmpi_task_json_")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "half.py", "x = 1\nraise ValueError('half way')\n")
    before, modules = list(sys.path), set(sys.modules)
    with raises(TaskError, "task-code-failed", "half.py", path, 2):
        build_task(f"{path}:build", {})
    assert sys.path == before
    assert set(sys.modules) == modules


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        path = write(tmp_path / folder / "t.py", GOOD.replace('"mine"', f'"{folder}"'))
        names.append(build_task(f"{path}:build", {}).name)
    assert names == ["a", "b"]


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "NAME = 'from beside'\n")
    path = write(tmp_path / "t.py", "import beside\n" + GOOD.replace('"mine"', "beside.NAME"))
    assert build_task(f"{path}:build", {}).name == "from beside"


def test_a_module_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "my_package" / "__init__.py", "")
    write(tmp_path / "my_package" / "tasks.py", GOOD)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert build_task("my_package.tasks:build", {}).name == "mine"
    assert sys.path == before


FAILURES = {
    "it raises": (
        "def build(options):\n    return 1 / 0\n",
        ("task-code-failed", "ZeroDivisionError", "task.py:2"),
    ),
    "it raises deeper": (
        "import json\ndef build(options):\n    json.loads('{')\n",
        ("task-code-failed", "JSONDecodeError", "task.py:3"),
    ),
    "it misses an option": (
        "def build(options):\n    return options['n']\n",
        ("task-code-failed", "KeyError: 'n' (", "task.py:2"),
    ),
    "it exits": (
        "def build(options):\n    raise SystemExit(3)\n",
        ("task-code-failed", "SystemExit: 3", "task.py:2"),
    ),
    "it returns nothing": ("def build(options):\n    pass\n", ("task-invalid", "returned nothing")),
    "it returns another thing": (
        "def build(options):\n    return 5\n",
        ("task-invalid", "returned an int"),
    ),
    "it takes no options": ("def build():\n    return 5\n", ("task-code-failed", "TypeError")),
    "it is no function": ("build = 5\n", ("task-invalid", "task.py is an int")),
    "it is misspelt": ("def biuld(options): ...\n", ("unknown-choice", "'build'", "'biuld'")),
    "it is absent": ("x = 1\n", ("unknown-choice", "'build'")),
    "a syntax error": ("def build(options:\n", ("task-code-failed", "SyntaxError", "task.py:1")),
    "an import is missing": (
        "import nowhere_at_all\n",
        ("task-code-failed", "'nowhere_at_all'", "task.py:1"),
    ),
}


@pytest.mark.parametrize("story", FAILURES)
def test_a_function_that_fails_is_explained(story: str, tmp_path: Path) -> None:
    source, refused = FAILURES[story]
    path = write(tmp_path / "task.py", source)
    with raises(TaskError, *refused):
        build_task(f"{path}:build", {})


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("nowhere.py:build", ("file-missing", "there is", "nowhere.py")),
        ("nowhere_at_all.tasks:build", ("task-code-failed", "nowhere_at_all.tasks")),
        ("nowhere.py", ("malformed-value", "nowhere.py:FUNCTION")),
        ("package.module:", ("malformed-value", "package.module:FUNCTION")),
    ],
)
def test_a_missing_file_module_or_function_is_named(name: str, refused: tuple[str, ...]) -> None:
    with raises(TaskError, *refused):
        build_task(name, {})


def test_an_error_of_dearmpis_own_is_passed_on(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.py",
        "from dearmpi.errors import DataError\n"
        "def build(options):\n    raise DataError('the disk is not mounted')\n",
    )
    with raises(DataError, "unnamed", "disk is"):
        build_task(f"{path}:build", {})


def test_an_option_that_the_function_never_reads_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.py", GOOD)
    with raises(TaskError, "unknown-task-option", "'nmae'"):
        build_task(f"{path}:build", {"nmae": "x", "name": "y"})


def test_a_function_may_take_all_options_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.py", GOOD.replace("options.get(", "dict(**options).get("))
    assert build_task(f"{path}:build", {"name": "y", "other": "z"}).name == "y"


def test_the_documented_example_trains(tmp_path: Path) -> None:
    source = DOCUMENT.read_text().split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    task = build_task(f"{write(tmp_path / 'sine.py', source)}:sine", {"width": "32"})
    batch_size, rate = task.defaults["batch_size"], task.defaults["lr"]
    assert isinstance(batch_size, int)
    assert isinstance(rate, float)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=rate)
    batches = Batches(len(task.train_data), batch_size, 1, 0)
    for step in range(100):
        (share,) = batches.step(*divmod(step, batches.steps_per_epoch))
        optimizer.zero_grad()
        loss = task.loss(task.model, load_batch(task, task.train_data, share.indices))
        torch.autograd.backward(loss)
        optimizer.step()
    assert loss.item() < 0.05
    assert task.eval_data is not None
    assert task.metrics is not None
    batch = load_batch(task, task.eval_data, tuple(range(200)))
    assert task.metrics(task.model, batch)["absolute error"] / 200 < 0.3
