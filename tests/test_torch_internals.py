"""Private names of torch stand in one file, dearmpi/torch_internals.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "dearmpi" / "torch_internals.py"


def _private_names() -> frozenset[str]:
    """Attributes of torch's objects with one leading underscore."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    node = (nn.Parameter(torch.ones(1)) * 2).grad_fn
    shown: list[object] = [torch.ones(1), nn.BatchNorm1d(1), optimizer, scheduler, node]
    shown += [torch.ones(1).untyped_storage(), torch.autograd.profiler, torch.compiler]
    shown += [torch.autograd.Variable, DistributedDataParallel, torch]
    marks = ("_is_flat_param", "_fsdp_flattened", "_torchdynamo_disable", "_get_registry")
    names = {name for thing in shown for name in dir(thing)}.union(marks)
    return frozenset(name for name in names if name.startswith("_") and name[1] != "_")


PRIVATE = _private_names()


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name of torch."""
    own = set(_own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imported(node)
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            base = ast.unparse(node.value)
            if base not in ("self", "cls") or node.attr not in own:
                yield node.lineno, f"{base}.{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in PRIVATE - own:
            yield node.lineno, repr(node.value)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in (module + alias.name for alias in node.names):
        first, *parts = name.split(".")
        if first == "torch" and any(part.startswith("_") for part in parts):
            yield node.lineno, name


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Names that a class here gives its objects: ``self.NAME = ...``, ``NAME: ...``, ``def``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "dearmpi").rglob("*.py"))
        if path != HOME
        for line, name in _uses(ast.parse(path.read_text(), str(path)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _functorch",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._C._current_graph_task_id()",
        "tensor._version",
        "module._parameters.values()",
        "class A:\n    def f(self): return self._optimizer_state_dict_pre_hooks",
        "getattr(tensor, '_is_flat_param', False)",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(_uses(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import torch.utils.hooks",
        "class A:\n    def __init__(self): self._buffers = {}\n    def f(self): self._buffers",
        "one._gradients()",
    ],
)
def test_what_is_no_private_name_of_torch_is_not_found(line: str) -> None:
    assert not list(_uses(ast.parse(line)))
