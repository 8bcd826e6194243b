"""Scripts of the shapes that people write for DistributedDataParallel, as functions of the wrapper.

Each ends with what it has trained and the optimizers; ``seen`` has the numbers that it would print.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

STEPS = 5


@dataclass(slots=True)
class Job:
    """What differs between the two runs of a script."""

    wrap: Callable[..., Any]
    rank: int
    size: int
    zero: Callable[..., Any] = ZeroRedundancyOptimizer

    def batch(self, step: int, rank: int | None = None, *, num: int = 4) -> Tensor:
        """This rank's inputs."""
        rank = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(num, 6, generator=generator, dtype=torch.float64)


@dataclass(slots=True)
class Trained:
    """How a script ends."""

    models: list[nn.Module]
    optimizers: list[Optimizer] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)


def network(seed: int = 0) -> nn.Sequential:
    """Three linear layers."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def loss_of(outputs: Tensor) -> Tensor:
    """Some loss."""
    return outputs.square().mean()


def plain_loop(job: Job) -> Trained:
    """The optimizer is made after the wrapper."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        loss = loss_of(model(job.batch(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return Trained([model], [optimizer], seen)


def optimizer_first(job: Job) -> Trained:
    """The optimizer and its scheduler are made before the wrapper."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    model = job.wrap(module, bucket_cap_mb=1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        scheduler.step()
    return Trained([model], [optimizer], [float(rate) for rate in scheduler.get_last_lr()])


def accumulation(job: Job) -> Trained:
    """By no_sync, by its flag, and by backwards that all synchronize."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 3 == 0:
            with model.no_sync():
                for micro in range(2):
                    loss_of(model(job.batch(10 * step + micro))).backward()
            loss_of(model(job.batch(10 * step + 2))).backward()
        for micro in range(3) if step % 3 else ():
            model.require_backward_grad_sync = micro == 2 or step % 3 == 2
            loss_of(model(job.batch(10 * step + micro))).backward()
        optimizer.step()
    return Trained([model], [optimizer])


def gradients_that_stay(job: Job) -> Trained:
    """Not all steps clear them."""
    model = job.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS + 2):
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        if step == 2:
            model.zero_grad()
        if step == 4:
            optimizer.zero_grad(set_to_none=False)
    return Trained([model], [optimizer])


def clipping(job: Job) -> Trained:
    """By norm and by value."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        if step % 2:
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
    return Trained([model], [optimizer], seen)


def gradients_read_and_changed(job: Job) -> Trained:
    """All that a script may do to ``param.grad``, and what it keeps of it."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    params = list(model.parameters())
    seen: list[float] = []
    kept: list[Any] = []
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        seen.append(sum(float(p.grad.abs().mean()) for p in params))
        seen += [float((old * p.grad).sum()) for old, p in zip(kept, params, strict=False)]
        kept = [p.grad if step % 2 else p.grad.view(-1).view(p.shape) for p in params]
        params[1].grad.add_(params[1].detach(), alpha=0.1)
        params[0].grad[0] = 0.5
        _change(params, step)
        optimizer.step()
        seen.append(sum(float(p.grad.norm()) for p in params if p.grad is not None))
    return Trained([model], [optimizer], seen)


def _change(params: list[Any], step: int) -> None:
    match step:
        case 3:
            params[2].grad = params[2].grad * 2
        case 4:
            params[4].grad = None
        case 5:
            params[3].grad.data = torch.ones_like(params[3])
        case 6:
            params[0].grad.view(-1)[:3].mul_(3.0)
        case _:
            nn.utils.clip_grad_norm_(params, 0.1)


def amp_and_scaler(job: Job, *, fused: bool = False) -> Trained:
    """A scaled loss, one of them infinite, unscaled to be clipped."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(job.batch(step)))
        loss = loss * (float("inf") if step == 2 and job.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return Trained([model], [optimizer], seen)


def accumulation_after_a_skipped_step(job: Job) -> Trained:
    """Gradients that no step has used stay, and those of no_sync() add to them."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    seen = []
    for step in range(2 * STEPS):
        if step in (0, 1, 4, 8):
            optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(loss_of(model(job.batch(3 * step)))).backward()
            scaler.scale(loss_of(model(job.batch(3 * step + 1)))).backward()
        outputs = model(job.batch(3 * step + 2))
        scale = math.inf if step in (3, 7) and job.rank == 0 else 1.0
        scaler.scale(loss_of(outputs) * scale).backward()
        if step in (5, 6):
            continue  # as a script that steps every few times only
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return Trained([model], [optimizer], seen)


def state_begun_anew(job: Job) -> Trained:
    """By clearing the optimizer's state, and by another one in its place."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        scheduler.step()
        if step == 3:
            optimizer.state.clear()
        if step == 6:
            optimizer.state = defaultdict(dict)
    return Trained([model], [optimizer])


def fused_and_scaler(job: Job) -> Trained:
    """The same with an optimizer that unscales, and leaves steps out, by itself."""
    return amp_and_scaler(job, fused=True)


def two_optimizers(job: Job) -> Trained:
    """A GAN: two models, each with its own optimizer."""
    maker, judge = job.wrap(network(0)), job.wrap(network(1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    head = torch.ones(3, 6, dtype=torch.float64)
    for step in range(STEPS):
        made = maker(job.batch(step)) @ head
        of_judge.zero_grad()
        real = judge(job.batch(step + 50)).mean()
        (judge(made.detach()).square().mean() - real).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()
    return Trained([maker, judge], [of_maker, of_judge])


def optimizers_of_parts(job: Job) -> Trained:
    """One model, two optimizers, one norm; a third layer joins later."""
    module = network()
    model = job.wrap(module)
    first = torch.optim.AdamW(module[0].parameters(), lr=0.01)
    second = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS + 1):
        if step == 3:
            second.add_param_group({"params": list(module[4].parameters()), "lr": 0.02})
        model.zero_grad()
        loss_of(model(job.batch(step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        first.step()
        second.step()
    return Trained([model], [first, second])


def optimizers_by_turns(job: Job) -> Trained:
    """Two over the same parameters."""
    model = job.wrap(network())
    both = [
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.optim.SGD(model.parameters(), lr=0.1),
    ]
    for step in range(STEPS + 1):
        optimizer = both[step % 2]
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
    return Trained([model], list(both))


def closures(job: Job) -> Trained:
    """A step with a closure, by LBFGS too."""
    models = [job.wrap(network(seed)) for seed in range(2)]
    optimizers: list[Optimizer] = [
        torch.optim.SGD(models[0].parameters(), lr=0.1),
        torch.optim.LBFGS(models[1].parameters(), max_iter=3),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model(job.batch(step)))
                loss.backward()
                return loss

            optimizer.step(closure)
    return Trained(models, optimizers[:1])


def moving_averages(job: Job) -> Trained:
    """Of the wrapped model, as torch's and as a copy of one's own."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = copy.deepcopy(model.module)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for mine, param in zip(own.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(param, alpha=0.1)
    return Trained([model, average.module, own], [optimizer])


class Recomputed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[:2], inputs, use_reentrant=False)
        outputs: Tensor = self.layers[4](checkpoint(self.layers[2:4], hidden, use_reentrant=False))
        return outputs


def recomputation(job: Job) -> Trained:
    """Gradient checkpointing."""
    model = job.wrap(Recomputed(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
    return Trained([model], [optimizer])


def uneven_inputs(job: Job) -> Trained:
    """The last ranks have fewer batches."""
    model = job.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(STEPS - 2 * job.rank):
            optimizer.zero_grad()
            loss_of(model(job.batch(step))).backward()
            optimizer.step()
    return Trained([model])


def uneven_inputs_with_buffers(job: Job) -> Trained:
    """Buffers that forwards read are those of the highest rank with batches, also afterwards."""
    models: list[nn.Module] = []
    seen: list[float] = []
    for counts in ((4, 1, 2), (1, 3, 3), (0, 2, 1)):
        module = Centred()
        module.mean += job.rank
        model = job.wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(
            steps: range, *, model: Any = model, optimizer: Optimizer = optimizer
        ) -> Iterator[float]:
            for step in steps:
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model(job.batch(2 * step))).backward()
                loss = loss_of(model(job.batch(2 * step + 1)))
                loss.backward()
                optimizer.step()
                yield loss.item()

        with model.join():
            seen += train(range(counts[job.rank]))
        seen.append(float(module.mean.sum()))
        seen += train(range(10, 12))
        models.append(module.layers)
    return Trained(models, [], seen)


def uneven_inputs_clipped(job: Job) -> Trained:
    """Gradients are clipped, read and replaced, while some ranks have no batches any more."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, *_, last = model.parameters()
    seen = []
    with model.join():
        for step in range(2 * STEPS - 3 * job.rank):
            optimizer.zero_grad()
            loss_of(model(job.batch(step))).backward()
            if step % 4 == 0:
                seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            if step % 4 == 1:
                nn.utils.clip_grad_value_(model.parameters(), 0.001)
            if step % 3 == 0:
                seen.append(float(last.grad.sum() + first.grad.norm()))
            if step % 4 == 2:
                first.grad = first.grad * 0.5
                last.grad = None
            optimizer.step()
    return Trained([model], [], seen)


def resume(job: Job) -> Trained:
    """To an earlier state, and in a new model."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: Any, steps: Iterator[int] | range) -> None:
        for step in steps:
            loss_of(model(job.batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    model.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    train(model, optimizer, range(2, 5))
    other = job.wrap(network(3))
    of_other = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(model.state_dict())
    of_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, of_other, range(4))
    return Trained([model, other], [optimizer, of_other])


def compiled(job: Job) -> Trained:
    """The wrapper compiled, and a model that is compiled in it."""
    trained = Trained([], [])
    for inside in (False, True):
        module = network()
        model = job.wrap(torch.compile(module, backend="aot_eager") if inside else module)
        called = model if inside else torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            loss = loss_of(called(job.batch(step)))
            optimizer.zero_grad()  # the compiler has seen the gradients of the last step
            loss.backward()
            optimizer.step()
        trained.models.append(module)
        trained.optimizers.append(optimizer)
    return trained


class Branches(nn.Module):
    """One layer that some batches use, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.branch = nn.Linear(6, 3, dtype=torch.float64)
        self.never = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs + self.branch(inputs) if branch else outputs


def unused_parameters(job: Job) -> Trained:
    """On some ranks, and on all."""
    torch.manual_seed(5)
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step != 3:
            optimizer.zero_grad()
        loss_of(model(job.batch(step), branch=(step + job.rank) % 3 == 0)).backward()
        optimizer.step()
    return Trained([model], [optimizer])


def unused_parameters_clipped(job: Job) -> Trained:
    """A layer that some ranks use, or some of the accumulated batches; its gradient is everywhere.

    Nobody uses it in step 1.
    """
    torch.manual_seed(5)
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        uses = step != 1 and job.rank == step % job.size
        with model.no_sync():
            loss_of(model(job.batch(2 * step), branch=uses and step > 2)).backward()
        loss_of(model(job.batch(2 * step + 1), branch=uses and step < 4)).backward()
        if step % 2:
            seen.append(-1.0 if model.module.branch.weight.grad is None else 1.0)
            seen += [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
    return Trained([model], [optimizer], seen)


def frozen_with_gradients(job: Job) -> Trained:
    """What is frozen goes on with its last gradient until that is cleared, used or not."""
    torch.manual_seed(5)
    model = job.wrap(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(2 * STEPS):
        if step not in (3, 4, 7):
            optimizer.zero_grad(set_to_none=step > 5)
        loss_of(model(job.batch(step), branch=step != 4)).backward()
        if step in (4, 7):
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
        if step in (2, 8):
            frozen = (*model.module.branch.parameters(), next(model.module.layers.parameters()))
            for param in frozen:
                param.requires_grad_(step == 8)
    return Trained([model], [optimizer], seen)


def parameters_of_no_optimizer(job: Job) -> Trained:
    """Their gradients add up until somebody clears them: all, some, or between two backwards."""
    model = job.wrap(network())
    head = model.module[4]
    optimizer = torch.optim.SGD(model.module[:4].parameters(), lr=0.05)
    seen = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2 or step % 3 == 2
            loss_of(model(job.batch(3 * step + micro))).backward()
            if step == 5:
                head.bias.grad = None
                optimizer.param_groups[0]["params"][0].grad.mul_(0.5)
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        if step in (3, 7):
            head.weight.grad = None
        if step == 8:
            model.zero_grad()
    seen += [float(param.grad.sum()) for param in head.parameters()]
    return Trained([model], [optimizer], seen)


def zero_redundancy(job: Job) -> Trained:
    """Rank 0 gets the optimizer's state."""
    model = job.wrap(network())
    optimizer = job.zero(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    saved = optimizer.state_dict() if job.rank == 0 else {"state": {}}
    averages = [float(state["exp_avg"].sum()) for _, state in sorted(saved["state"].items())]
    return Trained([model], [], averages)


def batch_norm(job: Job) -> Trained:
    """Running statistics are rank 0's in evaluation."""
    module = nn.Sequential(network(), nn.BatchNorm1d(3, dtype=torch.float64))
    model = job.wrap(module)
    # The last bias has a gradient of rounding errors alone, which a small eps would scale up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    seen = []
    for step in range(STEPS):
        model.train()
        optimizer.zero_grad()
        (model(job.batch(step)) - 0.3).pow(3).mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen.append(float(model(job.batch(99, 0)).sum()))
    return Trained([model], [optimizer], seen)


class Centred(nn.Module):
    """Its training forward reads a running mean that batches have made."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        with torch.no_grad():
            self.mean.lerp_(outputs.mean(0), 0.5)
        return outputs - self.mean


def buffers_read_in_training(job: Job) -> Trained:
    """Several forwards in a step, and in evaluation: each rank's own buffers, or rank 0's."""
    models: list[Any] = []
    seen = []
    choices: tuple[dict[str, bool], ...] = ({}, {"broadcast_buffers": False})
    for keeps in choices:
        module = Centred()
        module.mean += job.rank
        model = job.wrap(module, **keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                loss = loss_of(model(job.batch(10 * step + micro)))
                with torch.no_grad():
                    seen.append(float(model(job.batch(99)).sum()) if micro == step % 2 else 0.0)
                loss.backward()
            optimizer.step()
        models.append(model if keeps or job.rank == 0 else module.layers)
    return Trained(models, [], seen)


class _OwnSteps(nn.Module):
    """Each forward trains both parts, as ``train`` has it."""

    def __init__(self, train: Callable[[_OwnSteps, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([network(0), network(1)])
        self._train = train

    def forward(self, inputs: Tensor) -> Tensor:
        return self._train(self, inputs)


def steps_inside_the_forward(job: Job) -> Trained:
    """As Lightning's manual optimization drives the wrapper and its reducer."""

    def train(module: _OwnSteps, inputs: Tensor) -> Tensor:
        for part, optimizer in zip(module.parts, optimizers, strict=True):
            loss = loss_of(part(inputs))
            optimizer.zero_grad()
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([loss])
            loss.backward()
            optimizer.step()
        model.require_backward_grad_sync = False  # the wrapper has nothing to prepare any more
        return loss.detach()

    model = job.wrap(_OwnSteps(train), find_unused_parameters=True)
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(part.parameters(), lr=0.01) for part in model.module.parts
    ]
    seen = []
    for step in range(STEPS):
        seen.append(model(job.batch(step)).item())
        model.require_backward_grad_sync = True
    return Trained([model], optimizers, seen)


def wrapped_again(job: Job) -> Trained:
    """Each phase has its own wrapper and optimizer, as fits of Lightning; then the first go on."""
    module, seen = network(), []
    phases: list[tuple[Any, Optimizer]] = []
    for phase in range(4):
        if phase < 3:
            model = job.wrap(module)
            phases.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))
        model, optimizer = phases[phase % 3]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(job.batch(3 * phase + step))).backward()
            optimizer.step()
            seen.append(float(next(module.parameters()).detach().sum()))
    copied = copy.deepcopy(module)
    return Trained([module, copied], [phases[0][1], phases[2][1]], seen)


def moved_parameters(job: Job) -> Trained:
    """Elsewhere after some steps, as accelerate's move to "cpu:0", and while gradients add up."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(8):
        for part in range(2):
            loss_of(model(job.batch(2 * step + part))).backward()
            if (step, part) in ((0, 1), (3, 1), (5, 0)):
                model.to("cpu:0")
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        if step == 2:
            for param in model.parameters():
                param.data = param.data.clone()
        if step == 4:
            loss_of(model(job.batch(step))).backward()  # of gradients that are cleared afterwards
        optimizer.zero_grad()
    return Trained([model], [optimizer], seen)


def perturbed_parameters(job: Job) -> Trained:
    """Two backwards a step, the second one elsewhere, as sharpness-aware optimizers have them."""
    model = job.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        loss_of(model(job.batch(step))).backward()
        kept = []
        with torch.no_grad():
            for param in model.parameters():
                kept.append(param.data.clone())
                param.add_(param.grad, alpha=0.1)
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        for param, value in zip(model.parameters(), kept, strict=True):
            if step % 2:
                param.data = value
            else:
                param.data.copy_(value)
        optimizer.step()
        seen.append(sum(float(param.detach().sum()) for param in model.parameters()))
        optimizer.zero_grad()
    return Trained([model], [optimizer], seen)


def parameters_in_lists(job: Job) -> Trained:
    """Read and written right after steps through what the script has kept, as by Lookahead."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    params = list(model.parameters())
    slow = [param.detach().clone() for param in params]
    average = [param.detach().clone() for param in params]
    seen = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model(job.batch(step))).backward()
        optimizer.step()
        if step == 6:
            slow = [param.detach() for param in copy.deepcopy(params)]
        for param, kept in zip(optimizer.param_groups[0]["params"], slow, strict=True):
            if step % 3 == 2:
                kept.add_(param.data - kept, alpha=0.5)
                param.data.copy_(kept)
        with torch.no_grad():
            torch._foreach_lerp_(average, params, 0.1)
        assert all(type(param) is nn.Parameter for param in params)
        seen += [float(average[0].sum()), float(nn.utils.parameters_to_vector(params).sum())]
    return Trained([model], [optimizer], seen)


def steps_without_backward(job: Job) -> Trained:
    """They use the gradients that are there once more, changed or as they are."""
    model = job.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(2 * STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(job.batch(step))).backward()
        for _ in range(step % 4):
            optimizer.step()
        if step % 4 == 3:
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
        seen += [float(param.grad.sum()) for param in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    return Trained([model], [optimizer], seen)


class Contrasted(nn.Module):
    """A momentum encoder, whose parameters each forward replaces, and a trained layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = network(0), network(0)
        self.key.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                key.data = key.data * 0.9 + query.data * 0.1
            layer: Any = self.query[2]
            layer.weight.data = layer.weight.data.clamp(-0.2, 0.2)
            target = self.key(inputs)
        outputs: Tensor = self.query(inputs) - 0.5 * target
        return outputs


def momentum_encoder(job: Job) -> Trained:
    """The optimizer has all of the model, what is frozen included."""
    model = job.wrap(Contrasted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    seen = []
    for step in range(STEPS):
        loss = loss_of(model(job.batch(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return Trained([model], [optimizer], seen)


def accumulation_over_two_models(job: Job) -> Trained:
    """One optimizer has both, whose no_sync() begin and end together; one norm clips them."""
    models = [job.wrap(network(0)), job.wrap(network(1))]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    head = torch.ones(3, 6, dtype=torch.float64)
    seen = []
    for step in range(STEPS):
        for micro in range(2):
            for model in models[:: -1 if step == 3 else 1]:
                model.require_backward_grad_sync = micro == 1
            hidden = models[0](job.batch(2 * step + micro)) @ head
            loss_of(models[1](hidden)).backward()
        seen.append(float(nn.utils.clip_grad_norm_(params, 0.01)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained([*models], [optimizer], seen)


SCRIPTS: dict[str, Callable[[Job], Trained]] = {
    script.__name__: script
    for script in (
        *(plain_loop, optimizer_first, accumulation, gradients_that_stay, clipping),
        *(gradients_read_and_changed, amp_and_scaler, two_optimizers, optimizers_of_parts),
        *(optimizers_by_turns, closures, moving_averages, recomputation, uneven_inputs, resume),
        *(compiled, unused_parameters, zero_redundancy, batch_norm, steps_inside_the_forward),
        *(unused_parameters_clipped, parameters_of_no_optimizer, buffers_read_in_training),
        *(wrapped_again, moved_parameters, perturbed_parameters, frozen_with_gradients),
        *(fused_and_scaler, uneven_inputs_with_buffers, accumulation_after_a_skipped_step),
        *(state_begun_anew, uneven_inputs_clipped, parameters_in_lists, steps_without_backward),
        *(momentum_encoder, accumulation_over_two_models),
    )
}
