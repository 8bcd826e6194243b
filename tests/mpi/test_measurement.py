"""dear-train profile and dear-train calibrate on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.comm.world import World
from dearmpi.plan.model.profile import read_profile
from dearmpi.tune.calibration import read_calibration
from tests.unit.cli.test_measurement import TASK

pytestmark = pytest.mark.ranks(2, 3)


def test_rank_0_tells_and_writes_costs(
    world: World, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = shared_tmp_path / "link.json"
    code = main(["calibrate", "--seconds", "0.05", "--out", str(path)])
    world.barrier()
    result = read_calibration(path)
    assert code == (0 if result.flaw is None else 1)  # as the machine was busy meanwhile
    assert result.world_size == world.size
    assert result.hosts == world.hosts and result.library
    text = capfd.readouterr().out
    assert text == "" if world.rank else f"{world.size} ranks on " in text


def test_a_profile_of_several_ranks_is_one(world: World, shared_tmp_path: Path) -> None:
    if world.is_root:
        (shared_tmp_path / "tiny.py").write_text(TASK)
    world.barrier()
    path = shared_tmp_path / "tiny.json"
    task = f"{shared_tmp_path}/tiny.py:make"
    arguments = ["--task", task, "--batch-size", "6", "--num-batches", "2", "--out", str(path)]
    assert main(["profile", *arguments]) == 0
    world.barrier()
    profile = read_profile(path)
    assert profile.world_size == world.size
    assert profile.workload.batch_size == 6 // world.size
    assert [layer.name for layer in profile.workload.layers] == ["0", "2"]
