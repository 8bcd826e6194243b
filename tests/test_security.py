"""What is read never runs: nothing unpickles, evaluates text, or gives text to a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dearmpi

PACKAGE = Path(dearmpi.__file__).parent
ROOT = PACKAGE.parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
# mpi4py's lower-case methods pickle what they send.
PICKLING_METHODS = {"bcast", "gather", "allgather", "scatter", "alltoall", "allreduce", "isend"}


# What the ranks of one job, and processes that they start themselves, hand to each other alone.
OWN_BYTES = {
    "dearmpi/train/data/loading.py": "torch.load without weights_only=True",
    # What a script sends from one rank of its job to others.
    "dearmpi/comm/messages/values.py": "pickle",
}


def find_dangers(source: str) -> list[str]:
    """Each place of ``source`` where what is read could run."""
    tree = ast.parse(source)
    return [f"line {node.lineno}: {why}" for node in ast.walk(tree) for why in _why(node)]  # type: ignore[attr-defined]


def _why(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if _root(alias.name) in FORBIDDEN_MODULES]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if _root(node.module or "") in FORBIDDEN_MODULES else []
    if not isinstance(node, ast.Call):
        return []
    name = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in FORBIDDEN_CALLS or "shell" in keywords and keywords["shell"] != "False":
        return [name]
    if name == "torch.load" and keywords.get("weights_only") != "True":
        return ["torch.load without weights_only=True"]
    if name.rpartition(".")[2] in PICKLING_METHODS and "comm" in name.lower():
        return [f"{name} pickles"]
    return []


def _root(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "eval(text)",
        "yaml.load(text, Loader)",
        "comm.bcast(value)",
    ],
)
def test_dangers_are_found(source: str) -> None:
    assert find_dangers(source)


def test_nothing_that_is_read_can_run() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(files) > 100
    found = {str(f.relative_to(ROOT)): find_dangers(f.read_text()) for f in files}
    for name, danger in OWN_BYTES.items():
        assert [place for place in found[name] if not place.endswith(danger)] == []
        assert len(found.pop(name)) == 1
    assert {name: dangers for name, dangers in found.items() if dangers} == {}
