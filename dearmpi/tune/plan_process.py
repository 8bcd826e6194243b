"""Plan process: a plan is made in a process of its own while this one trains.

A thread would hold the interpreter's lock, for up to two seconds, against the training beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from dearmpi.config import Gather
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Conduct
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile, parse_profile
from dearmpi.plan.search.planner import make_plan, plan_of

_NICENESS = 10  # training goes first where cores are few
_LEAST_GAIN = 0.005
_REFUSED = 2  # the exit code of a process that was given what nothing can be planned from


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What ``make_plan`` is to be called with; of each iteration it sees one micro-batch.

    standing: what is in use, from which a plan must gain half a hundredth. To change costs about
        an iteration, which two hundred then earn; a shorter run loses less than one by it.
    """

    profile: ModelProfile
    costs: Costs
    eager: bool
    gather: Gather
    micro_batches: int = 1
    standing: Plan | None = None

    def to_json(self) -> str:
        return json.dumps(
            {
                "profile": self.profile.to_json(),
                "costs": asdict(self.costs),
                "eager": self.eager,
                "gather": self.gather,
                "micro_batches": self.micro_batches,
                "standing": None if self.standing is None else self.standing.to_json(),
            }
        )

    def carry_out(self) -> Plan:
        """Plan, here and now. Raises ConfigError where nothing can be planned."""
        plan = make_plan(
            self.profile,
            self.costs,
            world_size=self.costs.world_size,
            eager=self.eager,
            gather=self.gather,
        )
        plan = plan.over(self.micro_batches)
        if self.standing is None:
            return plan
        standing = self.standing.over(self.micro_batches)
        least_s = (1 - _LEAST_GAIN) * standing.prediction.iteration_s
        return plan if plan.prediction.iteration_s <= least_s else standing


def plan_in_use(
    profile: ModelProfile, costs: Costs, layout: BucketLayout, conduct: Conduct
) -> Plan | None:
    """The buckets in use as a plan; None where layers were frozen or thawed meanwhile."""
    try:
        return plan_of(profile, costs, layout, conduct, origin="the buckets in use")
    except ConfigError:
        return None


def parse_request(text: str) -> PlanRequest:
    plain: dict[str, Any] = json.loads(text)
    links = {key: LinkModel(**plain["costs"][key]) for key in ("reduce_scatter", "all_gather")}
    codec = plain["costs"].pop("codec")
    return PlanRequest(
        parse_profile(plain["profile"], "the profile"),
        Costs(**{**plain["costs"], **links}, codec=codec and CodecCost(**codec)),
        eager=plain["eager"],
        gather=plain["gather"],
        micro_batches=plain["micro_batches"],
        standing=plain["standing"] and Plan.from_json(plain["standing"], "what is in use"),
    )


class PlanProcess:
    """Makes the plan that ``request`` asks for, from now on."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._files = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        folder = str(Path(__file__).parents[2])
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._out = self._files.enter_context(_temporary(""))
            self._complaint = self._files.enter_context(_temporary(""))
            with _temporary(request.to_json()) as given:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name if __spec__ else __name__],
                    stdin=given,
                    stdout=self._out,
                    stderr=self._complaint,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,  # an interrupt at the terminal is for those who train
                )
        except OSError:
            pass  # where no process, or no file, can be had, ``result`` plans itself

    def is_done(self) -> bool:
        """Whether ``result`` need not wait for another process."""
        return self._process is None or self._process.poll() is not None

    def result(self) -> Plan:
        """The plan, as soon as it is there. Raises ConfigError where nothing can be planned."""
        code = None if self._process is None else self._process.wait()
        try:
            if code == 0:
                return Plan.from_json(_read(self._out), "the plan")
            if code == _REFUSED:
                raise ConfigError(_read(self._complaint).strip(), code="plan-not-found")
            return self._request.carry_out()  # the process was ended from outside
        finally:
            self.close()

    def close(self) -> None:
        """End the process, if it still runs. Safe to call twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._files.close()


def _temporary(text: str) -> TextIO:
    """A file without a name, unlike a pipe of any length, to be read from its start."""
    file: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    file.write(text)
    file.seek(0)
    return file


def _read(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def main() -> int:
    """Plan what stands on standard input."""
    os.nice(_NICENESS)
    try:
        sys.stdout.write(parse_request(sys.stdin.read()).carry_out().to_json())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
