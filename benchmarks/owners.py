"""What do owners save an optimizer that needs whole tensors, and what do others do with it?

A language model like GPT-2 trains by Muon, its embeddings, vectors and head by AdamW:

- ``gather="gradients"``: every rank updates all.
- ``shards="whole"``: the owner of a matrix updates it, and all other parameters are cut.
- round robin: torch's DistributedDataParallel over gloo; each rank updates every P-th matrix, an
  all-gather brings P matrices to all, and every rank runs AdamW on the rest.
- FSDP2: ``fully_shard`` around each block and the model, over gloo, and torch's Muon.
- even cuts: AdamW for all in equal shards, for its bytes; its updates are not timed.

Usage: mpirun -n 4 python benchmarks/owners.py [--width 128] [--layers 6] [--steps 5] [--fp32]
[--sleep GFLOPS] [WAY ...]
``--width 512 --layers 7 --steps 2`` is a model of 23 million parameters. ``--fp32``: Muon
multiplies in fp32, not bf16, so that the distance shows errors and no rounding. ``--sleep``: its
products are left out, and each rank sleeps as long as they take a core of its own at that speed, as
ranks do not that share cores.

Prints means over steps that follow each other, of the slowest rank and of all. CPU time is that of
the threads that update. Distance: of the last parameters to those of the first way, as a share of
how far these have moved. Sent: by a rank and step, between hosts, as their network devices count;
on one host by the cuts, where they tell it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dearmpi
from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.comm.world import World
from dearmpi.plan.data.owners import known_cost
from dearmpi.train.loop.optimizers import MuonWithAdamW, muon_groups
from dearmpi.train.tasks.bytes_lm import Transformer, TransformerShape

NUM_WARMUP = 1
CONTEXT, BATCH = 32, 2
LR, DECAY = 0.01, 0.1
_LIKE_ADAMW = "match_rms_adamw"  # how Muon scales its steps
SECONDS: list[float] = []  # of CPU, of the updates of a step


@dataclass(frozen=True)
class Entrant:
    """What trains. state: this rank's, of the optimizers. sent: bytes by the cuts, if known: the
    mean over the ranks, and of the rank with most.
    """

    model: nn.Module
    optimizers: Sequence[Any]
    state: Callable[[], Any]
    sent: Callable[[], tuple[float, float]] | None = None
    finish: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Result:
    """Of one rank: seconds of updates and of a step, bytes of state and sent, last parameters."""

    update_s: float
    step_s: float
    state: int
    sent: float
    most_sent: float
    parameters: Tensor


class TimedMuon(MuonWithAdamW):
    """Adds up the CPU time of its steps, of which each bucket takes one."""

    def step(self, closure: Any = None) -> Any:
        """As ``MuonWithAdamW`` does."""
        begin_s = time.thread_time()
        loss = super().step(closure)
        SECONDS.append(time.thread_time() - begin_s)
        return loss


class TimedSteps:
    """Optimizers that step one after the other on the main thread."""

    def __init__(self, *steps: Any) -> None:
        self._steps = steps

    def zero_grad(self) -> None:
        """As each does."""
        for one in self._steps:
            one.zero_grad()

    def step(self) -> None:
        """As each does."""
        begin_s = time.thread_time()
        for one in self._steps:
            one.step()
        SECONDS.append(time.thread_time() - begin_s)


class RoundRobin:
    """Muon, each matrix at one rank in turn, and an all-gather of as many as there are ranks."""

    def __init__(self, matrices: Iterable[nn.Parameter], world: World) -> None:
        self._world = world
        self._matrices = sorted(matrices, key=Tensor.numel, reverse=True)
        self.owned = [
            (one, torch.optim.Muon([one], lr=LR, weight_decay=DECAY, adjust_lr_fn=_LIKE_ADAMW))
            for one in self._matrices[world.rank :: world.size]
        ]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for one in self._matrices:
            one.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update what is owned here, and take over the rest."""
        size = self._world.size
        for turn, start in enumerate(range(0, len(self._matrices), size)):
            matrices = self._matrices[start : start + size]
            own = torch.zeros(matrices[0].numel())  # the largest; others are padded
            if turn < len(self.owned):
                param, optimizer = self.owned[turn]
                optimizer.step()
                own[: param.numel()] = param.flatten()
            found = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(found, own)
            for one, values in zip(matrices, found, strict=False):
                one.copy_(values[: one.numel()].view_as(one))


def parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices, and the rest."""
    groups = {one["kind"]: one["params"] for one in muon_groups(model, list(model.parameters()))}
    return groups["muon"], groups["adamw"]


def with_settings(model: nn.Module, world: World, inner: Any, **settings: Any) -> Entrant:
    """``DistributedOptimizer`` with ``settings``."""
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=world, **settings)

    def state() -> Any:
        local = optimizer.local_state()
        return [local.whole, local.owned, [piece.tensors for piece in local.pieces]]

    def sent() -> tuple[float, float]:
        ranks = range(world.size)
        nbytes = [0] * world.size
        for bucket in optimizer.layout:
            sizes = [bucket.cuts.size_of(rank) for rank in ranks]
            for rank in ranks:  # a reduce-scatter and an all-gather around a ring
                kept = sizes[rank] + sizes[(rank + 1) % world.size]
                nbytes[rank] += (2 * bucket.padded_numel - kept) * bucket.itemsize
        return sum(nbytes) / world.size, max(nbytes)

    return Entrant(model, [optimizer], state, sent, optimizer.synchronize, optimizer.close)


def round_robin(model: nn.Module, world: World) -> Entrant:
    """The usual distributed Muon."""
    matrices, rest = parted(model)
    muon = RoundRobin(matrices, world)
    adamw = torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY)
    wrapped = DistributedDataParallel(model)
    return Entrant(
        wrapped,
        [TimedSteps(muon, adamw)],
        lambda: [adamw.state, *(optimizer.state for _, optimizer in muon.owned)],
    )


def fsdp2(model: Transformer, world: World) -> Entrant:
    """torch's sharding, by which Muon's products become those of distributed tensors."""
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices, rest = parted(model)
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn=_LIKE_ADAMW)
    adamw = torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY)
    return Entrant(model, [TimedSteps(muon, adamw)], lambda: [muon.state, adamw.state])


def muon_with(**settings: Any) -> Callable[[Transformer, World], Entrant]:
    """A way of this package."""

    def enter(model: Transformer, world: World) -> Entrant:
        inner = TimedMuon(muon_groups(model, list(model.parameters())), lr=LR)
        return with_settings(model, world, inner, **settings)

    return enter


def even_cuts(model: Transformer, world: World) -> Entrant:
    """AdamW alone."""
    return with_settings(
        model, world, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    )


WAYS: dict[str, Callable[[Transformer, World], Entrant]] = {
    "gradients": muon_with(gather="gradients"),
    "owners": muon_with(shards="whole"),
    "round-robin": round_robin,
    "fsdp2": fsdp2,
    "even": even_cuts,
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of this rank, in whatever they are."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def device_bytes() -> int:
    """What this host's network devices have sent so far, but for the one to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): counters.split() for name, counters in (ln.split(":") for ln in lines)}
    return sum(int(words[8]) for name, words in counts.items() if name != "lo")


def sleep_instead(gflops: float) -> None:
    """From now on Muon sleeps for its products, at so many billion operations in a second."""

    @torch.no_grad()
    def step(muon: torch.optim.Muon, closure: Any = None) -> None:
        for group in muon.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = muon.state[param]
                    mean = state.setdefault("momentum_buffer", torch.zeros_like(param))
                    mean.lerp_(param.grad, 1 - group["momentum"])
                    time.sleep((known_cost("Muon", param.shape) or 0.0) / (1e9 * gflops))
                    param.add_(mean / (mean.norm() + 1e-7), alpha=-group["lr"])

    torch.optim.Muon.step = step  # type: ignore


def flat(model: nn.Module) -> Tensor:
    """All parameters, one after the other."""
    found = [param.detach() for param in model.parameters()]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    return torch.cat([one.flatten() for one in whole])


def train(world: World, shape: TransformerShape, way: str, num_steps: int) -> Result:
    """This rank's figures."""
    torch.manual_seed(0)
    entrant = WAYS[way](Transformer(shape), world)
    tokens = torch.Generator().manual_seed(1 + world.rank)
    begin_s, begin_bytes = 0.0, 0
    for step in range(NUM_WARMUP + num_steps):
        if step == NUM_WARMUP:
            entrant.finish()
            world.barrier()
            SECONDS.clear()
            begin_s, begin_bytes = time.perf_counter(), device_bytes()
        for optimizer in entrant.optimizers:
            optimizer.zero_grad()
        batch = torch.randint(shape.vocabulary, (BATCH, shape.context), generator=tokens)
        logits = entrant.model(batch)
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
        for optimizer in entrant.optimizers:
            optimizer.step()
    entrant.finish()
    step_s = (time.perf_counter() - begin_s) / num_steps
    world.barrier()
    sent, most = (device_bytes() - begin_bytes) / num_steps, 0.0
    if len(set(world.hosts)) < world.size:
        sent = 0.0
    if entrant.sent is not None:
        mean, most = entrant.sent()
        sent = sent or mean
    nbytes = sum(tensor.nbytes for tensor in tensors_in(entrant.state()))
    parameters = flat(entrant.model)
    entrant.close()
    return Result(sum(SECONDS) / num_steps, step_s, nbytes, sent, most, parameters)


def row_of(world: World, own: Result, start: Tensor, first: Tensor) -> str:
    """The figures of all ranks."""
    figures = [own.update_s, own.step_s, float(own.state), own.most_sent]
    update, step, state, most = world.all_reduce(figures, "max")
    mean_update, sent = world.all_reduce([own.update_s, own.sent], "mean")
    distance = float((own.parameters - first).norm() / (first - start).norm())
    megabytes = "".join(f"{n / 1e6:13.2f}" if n else f"{'-':>13}" for n in (state, sent, most))
    return f"{update:14.3f}{mean_update:8.3f}{step:9.3f}{megabytes}{distance:11.1e}"


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description="What do owners save?")
    for name, default in (("width", 128), ("layers", 6), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--sleep", type=float, metavar="GFLOPS")
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], metavar="WAY")
    options = parser.parse_args()
    world = dearmpi.connect()
    torch.set_num_threads(1)
    if options.fp32:
        torch.Tensor.bfloat16 = lambda values: values  # type: ignore
    if options.sleep:
        sleep_instead(options.sleep)
    join_group(world, patience_s=300.0)
    width, layers = options.width, options.layers
    shape = TransformerShape(vocabulary=1024, context=CONTEXT, width=width, depth=layers, heads=4)
    torch.manual_seed(0)
    start = flat(Transformer(shape))
    if world.is_root:
        print(f"{world.size} ranks, width {width}, layers {layers}, {len(start):,} parameters")
        print(
            f"{'':12}{'update, CPU s':>14}{'mean':>8}{'step, s':>9}{'state, MB':>13}"
            f"{'sent, MB':>13}{'most by cuts':>13}{'distance':>11}"
        )
    first: Tensor | None = None
    slept = [way for way in WAYS if way != "fsdp2"]  # which multiplies pieces of matrices
    for way in options.ways or (slept if options.sleep else WAYS):
        own = train(world, shape, way, options.steps)
        first = own.parameters if first is None else first
        row = row_of(world, own, start, first)
        if world.is_root:
            print(f"{way:12}{row}", flush=True)
    leave_group(failed=False)


if __name__ == "__main__":
    main()
