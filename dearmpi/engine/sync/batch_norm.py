"""Batch normalisation over the samples of all ranks.

Ranks compare which layer's exchange they are in before its numbers travel (``LayerCall``).
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dearmpi.comm.api.collectives import Collectives, Completed, Request
from dearmpi.comm.lifecycle import choose_world, connect
from dearmpi.comm.messages.collective_calls import digest
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.device.accelerator import through_host
from dearmpi.errors import ConfigError, MismatchError, UsageError
from dearmpi.torch_internals import BatchNorm, module_table, share_tables


class SyncBatchNorm(BatchNorm):
    """Batch normalisation whose mean and variance in training are those of all ranks' samples.

    For inputs (N, C, ...); N may differ between ranks, and be zero on some. In evaluation, also of
    a layer without running statistics, and in a world of one, it is an ordinary one. Every rank
    must call its layers in the same order, as each call waits for the others: for 2C+1 numbers of
    every rank forward, and a sum of 2C backward. Two more go ahead, while this rank adds up its
    samples, by which ranks in different calls end in a MismatchError.
    """

    layer_name = ""  # in the model, where that is known, for ranks to compare

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        world: World | None = None,
        **newer: Any,
    ) -> None:
        """As ``torch.nn.BatchNorm2d``. world: by default the one that this process was launched
        into, or that of the ``DistributedOptimizer`` which trains the layer. newer: what not every
        version of torch takes, such as ``bias``.
        """
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer
        )
        self._world: World | None = choose_world(world)
        self._is_chosen, self._is_of_group = world is not None, self._world.is_group

    def join_world(self, world: World) -> None:
        """Take ``world``, unless another one was given, or another optimizer has done so."""
        if not self._is_chosen:
            self._world, self._is_chosen, self._is_of_group = world, True, world.is_group

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, world: World | None = None) -> nn.Module:
        """Do what the function ``convert_sync_batchnorm`` does, as torch's method is called."""
        return convert_sync_batchnorm(module, world)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, (N, C, ...). Raises ValueError for another number of channels."""
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"the input has shape {tuple(input.shape)}, but SyncBatchNorm expects (N, C, ...) "
                f"with C = {self.num_features}"
            )
        if self.training and self._world is None:  # read from a file
            if self._is_of_group:
                raise ConfigError(
                    f"the layer {self.layer_name or 'SyncBatchNorm'} was saved on a group of "
                    "ranks, and knows no group here; give its model to DistributedOptimizer(..., "
                    "world=group), or to convert_sync_batchnorm(model, group), before it trains",
                    code="settings-contradict",
                )
            self._world = connect()
        if not self.training or self._world is None or self._world.size == 1:
            plain: Tensor = super().forward(input)
            return plain
        output: Tensor
        output, mean, variance, count = _normalize(
            input, self.weight, self.bias, self.eps, self.layer_name, self._world
        )
        if self.running_mean is not None:
            self._track(mean, variance, float(count))
        return output

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: the layer that is read connects when it trains."""
        return {**self.__dict__, "_world": None, "_is_chosen": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy with parameters and buffers of its own, in the same world."""
        twin: SyncBatchNorm = object.__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._world)] = self._world
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        return twin

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Move the running statistics as torch's do: with the unbiased variance."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def _check_input_dim(self, input: Tensor) -> None:
        """``forward`` has checked."""


def convert_sync_batchnorm(model: nn.Module, world: World | None = None) -> nn.Module:
    """Replace every batch normalisation in ``model`` by ``SyncBatchNorm``.

    Parameters and buffers are kept. Call it before the optimizer is made. Returns the model, which
    is another one only where ``model`` itself is such a layer. Raises ConfigError, with nothing
    replaced, for layers that do more.
    """
    _refuse_more(model)
    choose_world(world)
    converted = _convert(model, world, {})
    name_layers(converted)
    return converted


def name_layers(model: nn.Module, world: World | None = None) -> None:
    """Have the ``SyncBatchNorm`` layers of ``model`` known by their names in it, and those that
    were given no world average over ``world``.
    """
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            module.layer_name = name
            if world is not None:
                module.join_world(world)


def refuse_join(model: nn.Module) -> None:
    """Raise UsageError for ``SyncBatchNorm`` layers: a rank without batches would not take part in
    their reductions.
    """
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise UsageError(
            "join() cannot serve a model with SyncBatchNorm, whose layers wait for every rank; "
            "give all ranks as many batches, or use ordinary batch normalisation",
            code="join-misused",
        )


def _refuse_more(model: nn.Module) -> None:
    """Subclasses may do anything, of which a twin would know nothing."""
    forwards = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    for name, module in model.named_modules():
        kind = type(module)
        if not isinstance(module, BatchNorm) or issubclass(kind, SyncBatchNorm):
            continue
        own = {"forward", "train"} & vars(module).keys()  # as where a layer is kept from training
        of_kind = kind.forward not in forwards or kind.train is not nn.Module.train
        if of_kind or own or module_table(module):
            raise ConfigError(
                f"module {name or 'of the model'} is a {kind.__name__}, which does more than "
                "normalise: it has modules, a forward() or a train() of its own, and SyncBatchNorm "
                "would leave them out; put BatchNorm1d, 2d or 3d in its place, and what else it "
                "does into modules of their own",
                code="module-not-served",
            )


def _convert(
    module: nn.Module, world: World | None, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    """``converted``: what has become of modules, which may stand in several places."""
    if module not in converted:
        converted[module] = _twin_of(module, world)
        for name, child in list(module_table(module).items()):
            if child is not None:
                twin = _convert(child, world, converted)
                if twin is not child:
                    setattr(module, name, twin)
    return converted[module]


def _twin_of(module: nn.Module, world: World | None) -> nn.Module:
    """What stands in place of ``module`` alone."""
    if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
        twin = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            device="meta",  # its values come from the module
            world=world,
        )
        share_tables(twin, with_module=module)
        return twin.train(module.training)
    return module


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    name: str,
    world: World,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and mean, biased variance and number of samples per channel, over all ranks."""
    precise = torch.promote_types(input.dtype, torch.float32)
    # One for all layers and models, which all ranks call in one order.
    channel = world.shared_channel("batch norm")
    with torch.no_grad():
        layer = f"layer {name}".rstrip() + f" with {input.size(1)} channels in {precise}"
        call = LayerCall(layer, world, channel)
        mean, variance, count = _gather_moments(input.detach().to(precise), call)
    if float(count) < 2:
        raise ValueError(
            f"{int(count)} value(s) per channel over all ranks; training needs at least 2"
        )
    shape = [1, -1] + [1] * (input.dim() - 2)
    centred = _Standardize.apply(  # type: ignore[no-untyped-call]
        input.to(precise),
        mean.view(shape),
        (variance + eps).rsqrt().view(shape),
        count,
        call,
    )
    output: Tensor = centred
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(input.dtype), mean, variance, count


def _gather_moments(values: Tensor, call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count per channel, from every rank's own (Chan et al., 1983).

    Sums of squares would cancel where the mean is large.
    """
    call.announce("forward")
    others = [dim for dim in range(values.dim()) if dim != 1]
    num_channels = values.size(1)
    count = values.numel() // num_channels
    rows = values.new_zeros(call.world.size, 2 * num_channels + 1)
    if count:
        mean = values.mean(others)
        deviation = values - mean.view([1, -1] + [1] * (values.dim() - 2))
        own = [mean, deviation.square().sum(others), values.new_full((1,), count)]
        rows[call.world.rank] = torch.cat(own)
    call.run("all-gather", rows.view(-1))
    means, squares, counts = rows.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


class _Standardize(torch.autograd.Function):
    """``(input - mean) / deviation``, where mean and deviation depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        mean: Tensor,
        scale: Tensor,
        count: Tensor,
        call: LayerCall,
    ) -> Tensor:
        output = (input - mean) * scale
        ctx.save_for_backward(output, scale, count)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        output, scale, count = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        ctx.call.announce("backward")
        others = [dim for dim in range(grad.dim()) if dim != 1]
        sums = torch.cat([grad.sum(others), (grad * output).sum(others)])
        ctx.call.run("all-reduce", sums)
        shape = [1, -1] + [1] * (grad.dim() - 2)
        mean, slope = (part.view(shape) / count for part in sums.chunk(2))
        return (grad - mean - output * slope) * scale, None, None, None, None


class LayerCall:
    """One call of a layer, which ranks compare before each of its exchanges.

    Their messages have the length that its channels and data type give, so none may be posted for
    another call's. The comparison goes first on the channel, while this rank computes.
    """

    def __init__(self, layer: str, world: World, channel: Channel) -> None:
        """``layer``: what ranks must agree on, in words."""
        self.world, self._channel = world, channel
        self._layer, self._text = layer, ""
        self._seen = _numbers_of(self._text)

    def announce(self, direction: str) -> None:
        """This rank is in the ``direction`` of its call (collective)."""
        self._text = f"the {direction} of {self._layer}"
        seen = self._seen = _numbers_of(self._text)
        self._channel.submit(
            "comparison of calls of SyncBatchNorm", lambda c: c.start_all_reduce(seen, "max")
        )

    def run(self, kind: str, buffer: Tensor) -> None:
        """Exchange ``buffer`` in the call that was announced. Raises MismatchError on all ranks if
        they are not in the same one.
        """
        through_host(buffer, partial(self._run_on_host, kind))
        if self._differ():
            self._refuse(self._channel.all_gather_text("calls of SyncBatchNorm", self._text))

    def _run_on_host(self, kind: str, buffer: Tensor) -> None:
        def start(collectives: Collectives) -> Request:
            if self._differ():  # known by now, as the channel posts one operation after the other
                return Completed()
            if kind == "all-gather":
                return collectives.start_all_gather(buffer)
            return collectives.start_all_reduce(buffer, "sum")

        self._channel.run(f"{kind} of batch statistics", start)

    def _differ(self) -> bool:
        most, of_negatives = self._seen.tolist()
        return bool(most != -of_negatives)

    def _refuse(self, seen: list[str]) -> None:
        rank = next(rank for rank, text in enumerate(seen) if text != seen[0])
        hosts = self.world.hosts
        raise MismatchError(
            f"rank {rank} on {hosts[rank]} is in {seen[rank]} where rank 0 on {hosts[0]} is in "
            f"{seen[0]}; every rank must call the same SyncBatchNorm layers in the same order, and "
            "as often in training, on inputs of one data type",
            code="ranks-call-layers-differently",
        )


def _numbers_of(text: str) -> Tensor:
    """Of which the largest over ranks are each other's negatives where all have one text."""
    number = _hash_of(text)
    return torch.tensor([number, -number], dtype=torch.float64, device="cpu")


@lru_cache(maxsize=4096)
def _hash_of(text: str) -> int:
    return int(digest([text]), 16)
