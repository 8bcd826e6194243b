"""Scripts of the frameworks train on two ranks what one process trains on whole batches, in fp64.

Needs the packages of the extra ``frameworks``, which ``bin/test frameworks`` installs. A job runs
all scripts one after another.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.job import run_job

PACKAGES = ("accelerate", "evaluate", "lightning", "torchmetrics", "transformers")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed; bin/test frameworks installs them"
)

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
EXAMPLES = ROOT / "examples" / "frameworks"
LIMIT_S = 900  # of imports most of all
TOLERANCE = 1e-10
SAVED = {
    "lightning_trainer": "epoch=0.ckpt",
    "fabric_loop": "checkpoint",
    "transformers_trainer": "checkpoint-6",
    "accelerate_loop": "checkpoint",  # last: it ends torch.distributed
}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
Found = Mapping[str, dict[str, Any]]


def run(ranks: int, start: Sequence[str], scripts: Sequence[Sequence[str]]) -> str:
    """Return what all scripts print. start: Python's arguments before them."""
    given = [part for script in scripts for part in ("+", *script)][1:]
    ended = run_job(
        [sys.executable, *start, str(HERE / "drive.py"), *given],
        ranks=ranks,
        limit_s=LIMIT_S,
        environment=ENVIRONMENT,
    )
    assert ended.returncode == 0, ended.output
    return ended.output


def train(
    folder: Path, names: Sequence[str], ranks: int, *, resume: Path | None = None
) -> tuple[Found, str]:
    """Return what each script writes at its end, and what all print.

    On two ranks ``python -m dearmpi`` runs the scripts unchanged. From the checkpoints under
    ``resume`` they go on by ``dearmpi.integrations``.
    """
    scripts = []
    for name in names:
        (folder / name).mkdir()
        given = ["--folder", str(folder / name), "--processes", str(ranks)]
        given += ["--out", str(folder / f"{name}.pt")]
        if resume is not None:
            given += ["--resume", str(resume / name / SAVED[name])]
            given += ["--explicit"] * (ranks > 1)
        scripts.append([str(HERE / "scripts" / f"{name}.py"), *given])
    start = ["-m", "dearmpi"] if ranks > 1 and resume is None else []
    printed = run(ranks, start, scripts)
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}, printed


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """Return what one process trains, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("one")
    return train(folder, ["lightning_manual", *SAVED], 1)[0], folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path, str]:
    """Return what two ranks train, the folder of their checkpoints, and what they print."""
    folder = tmp_path_factory.mktemp("two")
    found, printed = train(folder, ["lightning_manual", *SAVED], 2)
    return found, folder, printed


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare parameters, and the numbers that the script has seen."""
    assert found["model"].keys() == expected["model"].keys()
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert found["seen"] == pytest.approx(expected["seen"], rel=TOLERANCE, abs=TOLERANCE)
    if "evaluated" in expected:
        evaluated = found["evaluated"], expected["evaluated"]
        torch.testing.assert_close(*evaluated, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["lightning_manual", *SAVED])
def test_scripts_train_unchanged(
    name: str, one: tuple[Found, Path], two: tuple[Found, Path, str]
) -> None:
    check_equal(two[0][name], one[0][name])


def test_rank_0_alone_logs(two: tuple[Found, Path, str]) -> None:
    lines = re.findall(r"^.*(?:epoch \d is over|'train_runtime').*$", two[2], re.MULTILINE)
    assert len(lines) == 5, lines  # two epochs of two loops, and the end of the Trainer's
    assert len(list((two[1] / "lightning_trainer").glob("lightning_logs/*"))) == 1


@pytest.mark.parametrize("ranks", [2, 1])
def test_training_goes_on_from_two_ranks(
    ranks: int, one: tuple[Found, Path], two: tuple[Found, Path, str], tmp_path: Path
) -> None:
    found, _ = train(tmp_path, list(SAVED), ranks, resume=two[1])
    for name in SAVED:
        check_equal(found[name], one[0][name])


def test_two_ranks_go_on_from_one(one: tuple[Found, Path], tmp_path: Path) -> None:
    found, _ = train(tmp_path, list(SAVED), 2, resume=one[1])
    for name in SAVED:
        check_equal(found[name], one[0][name])


def test_examples_before_and_after_their_diffs() -> None:
    names = ("lightning", "transformers", "accelerate")

    def numbers(start: Sequence[str], when: str, ranks: int) -> list[float]:
        given: dict[str, list[str]] = {"accelerate": []}  # others are told the number of ranks
        scripts = [
            [str(EXAMPLES / f"{name}_{when}.py"), *given.get(name, [str(ranks)])] for name in names
        ]
        # Alone, since what one of them sets would serve the next.
        printed = "".join(run(ranks, start, [script]) for script in scripts)
        found = re.findall(r"(?:epoch \d:|\bloss|\berror) (\d+\.\d{8,})", printed)
        return [float(value) for value in found]

    expected = numbers([], "before", 1)
    assert len(expected) == 4
    assert numbers(["-m", "dearmpi"], "before", 2) == pytest.approx(expected, rel=1e-7)
    assert numbers([], "after", 2) == pytest.approx(expected, rel=1e-7)


def test_another_way_than_ddp_is_refused_by_name() -> None:
    code = """
from dearmpi.errors import ConfigError
from dearmpi.integrations.accelerate import Accelerator
from dearmpi.integrations.lightning import DearStrategy
from dearmpi.integrations.transformers import TrainingArguments
for make, name in (
    (Accelerator, {"fsdp_plugin": 1}),
    (DearStrategy, {"model_averaging_period": 2}),
    (TrainingArguments, {"deepspeed": {"a": 1}}),
):
    try:
        make(**name)
    except ConfigError as error:
        assert error.code == "ddp-not-served" and next(iter(name)) in str(error), error
    else:
        raise AssertionError(name)
"""
    ended = run_job([sys.executable, "-c", code], ranks=1, limit_s=LIMIT_S, environment=ENVIRONMENT)
    assert ended.returncode == 0, ended.output
