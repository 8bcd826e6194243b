"""The example scripts run on two ranks; those for migration give the numbers of the originals."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.forks import forked
from tests.job import clean_environment, run_job

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LIMIT_S = 120

# Horovod on one rank, with the calls that the example makes.
STAND_IN = """
from contextlib import nullcontext

def init(): pass
def rank(): return 0
def size(): return 1
def broadcast_parameters(state, root_rank): pass
def broadcast_optimizer_state(optimizer, root_rank): pass
def allreduce(tensor, name): return tensor

def DistributedOptimizer(optimizer, named_parameters):
    list(named_parameters)
    optimizer.synchronize = lambda: None
    optimizer.skip_synchronize = nullcontext
    return optimizer
"""

# A DDP model that owns the group last frees it with Python's lock held, and waits for a thread of
# the group that may need the lock: the script would hang after all of its work.
KEEPING_GROUP = """
import ctypes
import runpy
import sys

import torch.distributed as dist


def destroy_but_keep(destroy=dist.destroy_process_group):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    destroy()


dist.destroy_process_group = destroy_but_keep
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_example(name: str, ranks: int = 2, arguments: Sequence[str] = ()) -> str:
    """What the example prints."""
    ended = run_job(
        forked([sys.executable, EXAMPLES / name, *arguments]),
        ranks=ranks,
        limit_s=LIMIT_S,
        environment={"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.output
    assert ended.left_over == 0
    return ended.output


def run_plain(environment: Mapping[str, str], *arguments: str | Path) -> str:
    """What a script without our launcher prints, errors included; ``arguments`` are Python's.

    Its exit status is not ours: on a busy machine a thread of torch's gloo group can still want the
    interpreter while that ends, which aborts the process after all of its work (pytorch#179291).
    """
    flags = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    ended = subprocess.run(
        forked([sys.executable, *arguments]),
        env={**clean_environment(), **flags, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return f"{ended.stdout}\n{ended.stderr}"


def run_under_torchrun(script: Path, ranks: int = 2) -> str:
    """What all ranks of a script print, with the environment and the store of torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    each = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        ended = pool.map(
            lambda environment: run_plain(environment, "-c", KEEPING_GROUP, script), each
        )
        return "\n".join(ended)


def number(output: str, label: str) -> float:
    """The last number that follows ``label``."""
    found = re.findall(rf"{label} (-?[\d.]+)", output)
    assert found, output
    return float(found[-1])


@pytest.mark.parametrize("name", ["plain_loop", "accumulation_clipping", "mixed_precision"])
def test_the_example_learns(name: str) -> None:
    output = run_example(f"{name}.py")
    assert "done" in output
    first, last = re.findall(r"loss ([\d.]+)", output)[:: len(re.findall("loss", output)) - 1]
    assert float(last) < 0.5 * float(first), output
    if name == "mixed_precision":
        assert number(output, "scale") < 2**20  # the first steps overflowed, and were skipped


def test_a_run_of_ones_own_goes_on_where_it_was(tmp_path: Path) -> None:
    output = run_example("own_run.py", arguments=[str(tmp_path / "run")])
    first, last = re.findall(r"loss ([\d.]+)", output)
    assert float(last) < 0.1 * float(first), output
    again = run_example("own_run.py", ranks=3, arguments=[str(tmp_path / "run")])
    assert "done" in again and "loss" not in again  # nothing is left to train


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_grid_of_ranks_gives_the_numbers_of_one_process(ranks: int) -> None:
    name = "tensor_and_data_parallel.py"
    alone, grid = run_example(name, 1), run_example(name, ranks)
    assert number(alone, "step 39 loss") == pytest.approx(number(grid, "step 39 loss"), abs=1e-9)
    assert number(grid, "step 39 loss") < 0.2 * number(grid, "step 0 loss")


def test_the_gan_finds_the_circle() -> None:
    assert number(run_example("gan.py"), "mean radius") == pytest.approx(1.0, abs=0.3)


def test_what_comes_after_ddp_gives_the_same_numbers() -> None:
    before = run_under_torchrun(EXAMPLES / "migration" / "ddp_before.py")
    after = run_example("migration/ddp_after.py")
    label = "sum of parameters"
    assert number(after, label) == pytest.approx(number(before, label), abs=1e-4)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_comes_after_horovod_gives_the_same_numbers(ranks: int, tmp_path: Path) -> None:
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(STAND_IN)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    before = run_plain({"PYTHONPATH": path}, EXAMPLES / "migration" / "horovod_before.py")
    after = run_example("migration/horovod_after.py", ranks)
    assert number(after, "mean loss") == pytest.approx(number(before, "mean loss"), abs=1e-4)


@pytest.mark.parametrize("guide", ["ddp", "horovod"])
def test_the_guide_shows_the_scripts_as_they_are(guide: str) -> None:
    text = (ROOT / "docs" / "how-to" / f"from-{guide}.md").read_text()
    for moment in ("before", "after"):
        script = (EXAMPLES / "migration" / f"{guide}_{moment}.py").read_text()
        tree = ast.parse(script)
        (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        lines = [line.strip() for line in script.splitlines()[main.lineno : main.end_lineno]]
        missing = [line for line in lines if line not in text]
        assert not missing, f"{guide}_{moment}.py has lines that the guide lacks: {missing}"


@pytest.mark.parametrize("name", ["accelerate", "transformers", "lightning"])
def test_a_framework_needs_three_changed_lines_and_the_guide_shows_them(name: str) -> None:
    guide = (ROOT / "docs" / "how-to" / "frameworks.md").read_text()
    scripts = [EXAMPLES / "frameworks" / f"{name}_{moment}.py" for moment in ("before", "after")]
    before, after = ([line.strip() for line in path.read_text().splitlines()] for path in scripts)
    lines = difflib.ndiff(before[1:], after[1:])  # the first is the docstring
    changed = [line for line in lines if line[0] in "+-" and line[2:]]
    assert 1 <= sum(line[0] == "+" for line in changed) <= 3, changed
    missing = [line for line in changed if line not in guide]
    assert not missing
