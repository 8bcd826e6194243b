"""Part: profile files of the paper's workloads at its batch sizes, for the replay benchmark."""

from __future__ import annotations

import torch
from torch import nn

from dearmpi.tune.layer_timer import LayerTimer
from tests.gpu.machine import FOLDER, IS_DRY, device, say
from tests.gpu.models import ABSENT, WORKLOADS, Workload

NUM_WARMUP, NUM_PASSES = (1, 1) if IS_DRY else (5, 10)


def measure(workload: Workload) -> None:
    model = workload.build().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    size = 2 if IS_DRY else workload.batch_size
    inputs, labels = workload.batch(size, device())
    timer = LayerTimer(model, num_warmup=NUM_WARMUP)
    for _ in range(NUM_WARMUP + NUM_PASSES):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    unit = "sentence" if workload.reads_text else "image"
    profile = timer.finish(name=workload.name, batch_size=size, unit=unit)
    (FOLDER / f"profile-{workload.name}.json").write_text(profile.to_json())
    say(
        None,
        f"profile, {workload.name}",
        f"batch {size}",
        f"feed-forward {1e3 * profile.feed_forward_s:.1f} ms, "
        f"backprop {1e3 * profile.backprop_s:.1f} ms",
    )


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for workload in list(WORKLOADS.values())[: 1 if IS_DRY else None]:
        measure(workload)
    for name, reason in ABSENT.items():
        say(None, f"profile, {name}", "", f"skipped: {reason}")


main()
