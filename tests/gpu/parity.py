"""Part: training on the device, on all ranks, equals training in one process there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import dearmpi
from dearmpi.tune.device_probe import ALL_GATHER, probe_devices
from tests.gpu.machine import IS_DRY, device, say
from tests.mpi import oracle
from tests.mpi.models import build_model
from tests.mpi.oracle import Case

CASES = [
    Case(optimizer="adamw", groups=3),
    Case(model="branches", optimizer="adam", eager=True, window=1),
    Case(model="text", optimizer="nesterov", gather="gradients", reduce_scatter="exchange"),
    Case(model="image", optimizer="adam", micro_batches=3, clip=2.0, scheduler="lambda"),
    Case(model="matrices", optimizer="adafactor", gather="gradients", clip=2.0),
    Case(optimizer="sgd", schedule="wfbp", cap_mb=1.0),
    Case(model="mixed", optimizer="nesterov", schedule="serial"),
]


NEEDED = {ALL_GATHER, *(case.reduce_scatter for case in CASES)}
HOST_CASES = [replace(case, update_on="host") for case in CASES if case.gather == "parameters"]


def move_oracle() -> None:
    """Let the oracle train on the device."""
    build, batch = build_model, oracle.batch

    def build_there(name: str) -> Any:
        return build(name).to(device())

    def batch_there(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs, flags = batch(step, dtype)
        return inputs.to(device()), flags.to(device())

    for name, there in (("build_model", build_there), ("batch", batch_there)):
        setattr(oracle, name, there)


def main() -> None:
    verdicts = probe_devices(always=False)
    world = dearmpi.connect()
    move_oracle()
    # Direct needs what rank 0 has found out; the others took what time they needed for the same.
    works = {verdict.operation for verdict in verdicts if verdict.works} >= NEEDED
    can_go_direct = world.all_reduce([float(works)], "min")[0] > 0
    ways = ["staged", "direct"] if can_go_direct else ["staged"]
    cases = CASES if IS_DRY else [*CASES, *HOST_CASES]
    for way in ways:
        for case in cases:
            # Without a device the setting would have no effect, and is refused.
            asked = case if IS_DRY else replace(case, cuda_buffers=way)
            found = oracle.train(asked, world)
            oracle.assert_same(found, oracle.train(case))
        what = f"{len(cases)} cases" + (", on the host" if IS_DRY else "")
        say(world, f"parity, {way}", f"{world.size} ranks", f"equal to one process in {what}")
    if not can_go_direct:
        said = "this MPI takes no device memory" if not IS_DRY else "there is no device"
        say(world, "parity, direct", f"{world.size} ranks", f"skipped: {said}")


main()
