"""bin/demo, with stand-ins for the set-up and for mpirun."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.stand_in import stand_in

DEMO = Path(__file__).parents[1] / "bin" / "demo"


def test_it_trains_on_two_ranks_of_its_own_inside_a_step_of_slurm(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin" / "setup", "")
    stand_in(tmp_path / ".venv" / "bin" / "mpirun", 'printf "%s\\n" "$*"; env')
    shutil.copy(DEMO, tmp_path / "bin")
    step = {"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMI_RANK": "0"}
    ended = subprocess.run(
        [tmp_path / "bin" / "demo", "--max-steps", "3"],
        env={"PATH": "/usr/bin:/bin", **step},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    command, *variables = ended.stdout.splitlines()
    assert command == "-n 2 dear-train run --max-steps 3"
    assert not {line.partition("=")[0] for line in variables} & step.keys()
