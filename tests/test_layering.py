"""Imports point one way: cli > doctor > bench > train > report and engine > device > tune > plan,
comm > config. drop_in stands on the package's public names, integrations on drop_in.

Everything may import errors, which imports nothing; so does version. torch_internals holds every
private name of torch; it stands beside the parts since engine, tune and bench need some. Within a
part, rooms point one way as well.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dearmpi"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"

_LIBRARY = frozenset(
    {
        "batch_shares",
        "engine",
        "device",
        "tune",
        "plan",
        "comm",
        "config",
        "cuts",
        "errors",
        "grid",
        "span",
        "chunk_orders",
    }
)
_TORCH = frozenset({"torch_internals"})

# What each part may import from the package; every part may import from itself. The package is
# dearmpi/__init__.py: what a user of the library sees.
BELOW: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "version": frozenset(),
    "error_codes": frozenset(),
    "config": frozenset({"errors"}),
    "guessed": frozenset({"errors"}),
    "batch_shares": frozenset({"errors"}),
    "cuts": frozenset(),
    "chunk_orders": frozenset(),
    "grid": frozenset({"cuts", "chunk_orders"}),
    "span": frozenset(),
    "torch_internals": frozenset(),
    "plan": frozenset(
        {"batch_shares", "chunk_orders", "config", "cuts", "errors", "grid", "version"}
    ),
    "comm": frozenset({"batch_shares", "config", "cuts", "errors", "grid", "guessed"}),
    "device": _TORCH | {"tune", "plan", "comm", "config", "cuts", "errors", "grid"},
    "engine": _TORCH
    | {"device", "tune", "plan", "comm", "config", "cuts", "errors", "grid", "guessed", "span"},
    # Ranks that train by themselves between exchanges, which are those of an optimizer of engine.
    "local": _TORCH | {"engine", "plan", "comm", "config", "errors", "guessed"},
    "tune": _TORCH | {"plan", "comm", "config", "cuts", "errors", "grid", "version"},
    "report": frozenset({"plan", "config", "errors", "span"}),
    "train": _LIBRARY | {"local", "report", "version"},
    "drop_in": _TORCH | {PACKAGE, "config", "errors"},
    "integrations": frozenset({PACKAGE, "config", "drop_in", "errors"}),
    PACKAGE: _LIBRARY | {"drop_in", "guessed", "local", "train", "version"},
    "bench": _LIBRARY | _TORCH | {PACKAGE, "local", "train", "report"},
    # It measures as a benchmark does, and judges what a run would do: above both.
    "doctor": _LIBRARY | {PACKAGE, "bench", "train", "report"},
    "cli": _LIBRARY | {"local", "version", PACKAGE, "doctor", "bench", "train", "report"},
    "__main__": frozenset({"comm", "drop_in"}),
}

# What each room, or file beside the rooms, may import of its part, besides itself.
_ENGINE_BASE = frozenset({"bucket", "usage_errors"})
_REPORT = frozenset({"read", "analyse", "draw"})
_FILES = frozenset({"disk"})
_TASKS = _FILES | {"tasks", "settings"}
ROOMS: dict[str, dict[str, frozenset[str]]] = {
    "comm": {
        "api": frozenset(),
        "messages": frozenset({"api"}),
        "watchdog": frozenset({"api", "messages"}),
        "ending": frozenset(),
        "process": frozenset({"api", "watchdog"}),
        "progress": frozenset({"api", "messages", "watchdog"}),
        "world": frozenset({"api", "ending", "messages", "watchdog", "progress"}),
        "algorithms": frozenset({"api", "progress", "world"}),
        "backends": frozenset({"api", "algorithms", "process", "watchdog"}),
        "lifecycle": frozenset({"api", "backends", "process", "watchdog", "world"}),
    },
    "plan": {
        "data": frozenset(),
        "model": frozenset({"data"}),
        "simulate": frozenset({"data", "model"}),
        "search": frozenset({"data", "model", "simulate"}),
        "rivals": frozenset({"data", "model", "simulate", "search"}),
    },
    "report": {
        "read": frozenset(),
        "analyse": frozenset({"read"}),
        "draw": frozenset({"read", "analyse"}),
        "page": _REPORT,
    },
    "engine": {
        "usage_errors": frozenset(),
        "trace": frozenset(),
        "bucket": frozenset({"usage_errors"}),
        "update": frozenset({"bucket"}),
        "codec": frozenset({"bucket", "trace", "update"}),
        "probe": frozenset({"update"}),
        "agreement": frozenset({"bucket", "update"}),
        "state": _ENGINE_BASE | {"probe", "sync", "update"},
        "sync": frozenset({"agreement", "bucket"}),
        "iteration": _ENGINE_BASE | {"agreement", "codec", "state", "sync", "trace", "update"},
        "setup": _ENGINE_BASE
        | {"agreement", "codec", "iteration", "probe", "state", "sync", "trace", "update"},
        "facade": frozenset({"usage_errors", "state"}),
        "readings": frozenset({"facade", "setup", "trace"}),
        "scaling": frozenset({"facade", "iteration"}),
        "optimizer": frozenset({"iteration", "readings", "scaling", "setup", "state"}),
    },
    "train": {
        "settings": frozenset(),
        "disk": frozenset(),
        "ranks": frozenset({"settings"}),
        "metrics": _FILES,
        "checkpoint": _FILES,
        "tasks": _FILES | {"checkpoint"},
        "data": frozenset({"ranks", "tasks"}),
        "run": _TASKS | {"checkpoint", "data", "metrics", "ranks"},
        "loop": _TASKS | {"checkpoint", "data", "metrics", "ranks", "run"},
    },
}

_TORCH_PARTS = frozenset(
    {
        "torch_internals.py",
        "device",
        "engine",
        "local",
        "tune",
        "train",
        "bench",
        "doctor",
        "drop_in",
    }
)

# Where alone these may be imported, and where else for type checkers.
CONFINED: dict[str, frozenset[str]] = {
    "mpi4py": frozenset({"comm/backends/mpi.py"}),
    "torch": _TORCH_PARTS,
    "click": frozenset({"cli"}),
}
CONFINED_TYPES: dict[str, frozenset[str]] = {"torch": frozenset({"comm"})}
STANDARD_LIBRARY_ONLY = frozenset(
    {"plan", "chunk_orders", "config", "cuts", "errors", "grid", "guessed"}
)


class Imports(ast.NodeVisitor):
    """Absolute names of all modules that a file imports, wherever in it."""

    def __init__(self, module: str, *, is_package: bool) -> None:
        self._parents = module.split(".") if is_package else module.split(".")[:-1]
        self._in_type_checking = False
        self.found: list[tuple[int, str, bool]] = []

    def visit_If(self, node: ast.If) -> None:
        """Tell apart what only type checkers import."""
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        before, self._in_type_checking = self._in_type_checking, True
        for child in node.body:
            self.visit(child)
        self._in_type_checking = before
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        """``import a.b``."""
        for alias in node.names:
            self.found.append((node.lineno, alias.name, self._in_type_checking))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from a import b``: b may be a module, so it counts with its name."""
        base = node.module or ""
        if node.level:
            parents = self._parents[: len(self._parents) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            self.found.append((node.lineno, f"{base}.{alias.name}", self._in_type_checking))


def find_violations(root: Path) -> list[str]:
    """Every import in ``root``/dearmpi that points the wrong way, with what is wrong with it."""
    return [
        f"{path.relative_to(root)}:{line}: {problem}"
        for path in sorted((root / PACKAGE).rglob("*.py"))
        for line, problem in _violations_of(path, root)
    ]


def _violations_of(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    inside = path.relative_to(root / PACKAGE)
    part = _part_of_file(inside)
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    imports = Imports(module.removesuffix(".__init__"), is_package=path.name == "__init__.py")
    imports.visit(ast.parse(path.read_text(), str(path)))
    if part not in BELOW:
        yield 1, f"{part} is no part of the design; give it a place in {Path(__file__).name}"
        return
    rooms = ROOMS.get(part, {})
    room = inside.with_suffix("").parts[1] if len(inside.parts) > 1 else "__init__"
    if rooms and room not in rooms and room != "__init__":
        yield 1, f"{room} is no room of {part}; give it a place in {Path(__file__).name}"
        return
    for line, name, types_only in imports.found:
        top = name.partition(".")[0]
        entered = name.split(".")[2] if name.startswith(f"{PACKAGE}.{part}.") else None
        if entered in rooms and room in rooms and entered not in {room, *rooms[room]}:
            yield line, f"{room} imports {name}, but may import {_listed(rooms[room])}"
        target = _part_of_import(name)
        if target is not None:
            if target != part and target not in BELOW[part]:
                yield line, f"{part} imports {name}, but may import {_listed(BELOW[part])}"
        elif top in CONFINED and not _may_import(top, part, inside, types_only):
            yield line, f"{part} imports {name}, which belongs to {_listed(CONFINED[top])}"
        elif part in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            yield line, f"{part} imports {name}, but needs nothing beyond the standard library"


def _part_of_file(inside: Path) -> str:
    first = inside.with_suffix("").parts[0]
    return PACKAGE if first == "__init__" else first


def _part_of_import(name: str) -> str | None:
    """The part that ``dearmpi.part.module`` is in; the package itself for ``dearmpi.connect``."""
    top, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if top != PACKAGE:
        return None
    return first if first in BELOW else PACKAGE


def _may_import(top: str, part: str, inside: Path, types_only: bool) -> bool:
    places = CONFINED[top] | (CONFINED_TYPES.get(top, frozenset()) if types_only else frozenset())
    return part in places or inside.as_posix() in places


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing of the package"


def test_imports_point_one_way() -> None:
    violations = find_violations(ROOT)
    assert not violations, "\n".join(violations)


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {_module_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    below: dict[str, set[str]] = {}
    for module, path in files.items():
        imports = Imports(module, is_package=path.name == "__init__.py")
        imports.visit(ast.parse(path.read_text()))
        names = (name for _, name, types_only in imports.found if not types_only)
        found = {name if name in files else name.rpartition(".")[0] for name in names}
        below[module] = found & files.keys() - {module}
    assert len(list(TopologicalSorter(below).static_order())) == len(files)


def _module_of(path: Path) -> str:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return module.removesuffix(".__init__")


def test_files_of_the_engine_import_few_of_the_package_and_their_constructors_take_few() -> None:
    crowded = {}
    for path in sorted((ROOT / PACKAGE / "engine").rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        }
        makers = [
            node.args
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ]
        most = max((len([*a.posonlyargs, *a.args, *a.kwonlyargs]) - 1 for a in makers), default=0)
        if len(modules) > 10 or most > 8:
            crowded[path.name] = (len(modules), most)
    assert not crowded


def test_no_file_and_no_class_has_the_name_of_another() -> None:
    paths = [path for path in (ROOT / PACKAGE).rglob("*.py") if not path.name.startswith("__")]
    classes = [
        node.name
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter([path.name for path in paths] + classes)
    # The command of a plan is `plan`; the drop-in's SyncBatchNorm stands in for torch's.
    assert {name for name, count in names.items() if count > 1} == {"plan.py", "SyncBatchNorm"}


@pytest.mark.parametrize(
    ("file", "line", "problem"),
    [
        (
            "plan/data/layout.py",
            "import dearmpi.engine.iteration.engine",
            "plan imports dearmpi.engine.iteration.engine",
        ),
        ("plan/data/layout.py", "from dearmpi import comm", "plan imports dearmpi.comm"),
        (
            "plan/data/layout.py",
            "from ...comm import api",
            "plan imports dearmpi.comm.api",
        ),
        ("plan/data/layout.py", "import numpy", "plan imports numpy"),
        ("plan/data/layout.py", "import torch.nn", "plan imports torch"),
        ("config.py", "def f():\n    import dearmpi.plan", "config imports dearmpi.plan"),
        ("tune/layer_timer.py", "from dearmpi.engine import x", "tune imports dearmpi.engine.x"),
        (
            "engine/iteration/engine.py",
            "from dearmpi import connect",
            "engine imports dearmpi.connect",
        ),
        ("comm/world.py", "from mpi4py import MPI", "comm imports mpi4py.MPI"),
        ("comm/world.py", "import torch", "comm imports torch"),
        ("train/loop/loop.py", "import click", "train imports click"),
        (
            "train/loop/loop.py",
            f"{TYPES}    from dearmpi.cli import main",
            "train imports dearmpi.cli",
        ),
        ("report/page/report.py", "import torch", "report imports torch"),
        ("helpers/things.py", "", "helpers is no part of the design"),
        ("engine/helpers/things.py", "", "helpers is no room of engine"),
        ("engine/bucket/a.py", "from dearmpi.engine.update import b", "bucket imports dearmpi."),
        ("comm/api/a.py", "from ..watchdog.watchdog import Watchdog", "api imports dearmpi.comm.w"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, line: str, problem: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (found,) = find_violations(tmp_path)
    assert found.startswith(f"{PACKAGE}/{file}:") and problem in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("plan/data/layout.py", "from . import schedule\nimport dearmpi.config\nimport math"),
        ("plan/__init__.py", "from .data.layout import Layout"),
        ("comm/backends/mpi.py", "from mpi4py import MPI\nimport numpy"),
        ("comm/api/collectives.py", f"{TYPES}    import torch"),
        ("bench/loop.py", "import torch\nfrom dearmpi import __version__, connect"),
        ("cli/main.py", "import click\nfrom dearmpi.train import task"),
        ("__main__.py", "from dearmpi.drop_in.start import main"),
        ("__init__.py", "from dearmpi.comm.lifecycle import connect"),
    ],
)
def test_a_right_import_is_not_found(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert not find_violations(tmp_path)
