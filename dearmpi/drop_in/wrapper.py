"""DistributedDataParallel: torch's wrapper, by its interface, with dearmpi's engines behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import dearmpi
from dearmpi.drop_in import arguments
from dearmpi.drop_in.serving import ModelServing
from dearmpi.errors import ArgumentError, UsageError
from dearmpi.torch_internals import ignored_by_ddp, leave_out


class DistributedDataParallel(nn.Module):
    """torch's DistributedDataParallel over MPI, with the same constructor and methods (collective).

    Gradients are averaged over all ranks. Optimizers of the model's parameters, made before or
    after, are served from their first step: with their class and ``state_dict()``, and updates
    behind the next forward. ``param.grad`` after backward is the averaged gradient.

    module: the model that was given.
    """

    _active_ddp_module = None  # which torch's compiler asks the class for

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        **others: Unpack[arguments.OtherArguments],
    ) -> None:
        """Copies rank 0's parameters and buffers to all ranks.

        broadcast_buffers: all ranks get rank 0's after each step, and before a further forward;
        its newer name in torch is forward_sync_buffers. bucket_cap_mb: as in ``EngineConfig``.
        Other arguments are torch's: accepted with a printed line where they have no meaning here.
        Raises ArgumentError for those that cannot be served.
        """
        super().__init__()
        world = dearmpi.connect()
        given = {"output_device": output_device, "dim": dim, "init_sync": init_sync}
        arguments.check(world, {**given, "process_group": process_group, **others})
        if device_ids is not None and len(device_ids) > 1:
            raise ArgumentError(
                f"device_ids has {len(device_ids)} devices; give each rank one", code="wrong-type"
            )
        if unserved := ignored_by_ddp(module):
            raise ArgumentError(
                f"DistributedDataParallel cannot leave out {', '.join(sorted(unserved))}; set "
                "requires_grad=False on these parameters, or have them averaged too",
                code="ddp-not-served",
            )
        self.module = module
        self.device_ids = None if device_ids is None else list(device_ids)
        newer = others.get("forward_sync_buffers")
        self.broadcast_buffers = (broadcast_buffers if newer is None else newer) is not False
        self._bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = bool(others.get("find_unused_parameters"))
        self.static_graph = bool(others.get("static_graph"))
        self.require_forward_param_sync = True  # frameworks set it; buffers travel after steps
        self.process_group = process_group
        self._synchronizes = True
        self._serving: ModelServing | None = None
        self.register_forward_pre_hook(_prepare)
        if world.size > 1:
            self._serve().prepare()
            self._serve().note_wrapped()
            if newer is False and broadcast_buffers is not False and init_sync:
                dearmpi.broadcast_buffers(module, world)  # by this name, torch's does it once

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward averages gradients."""
        return self._synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronizes: bool) -> None:
        self._synchronizes = synchronizes
        if self._serving is not None:
            self._serving.synchronizes = synchronizes

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output; with ``device_ids`` for inputs that are moved there."""
        if self.device_ids:
            inputs, kwargs = _moved((inputs, kwargs), torch.device(self.device_ids[0]))
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside, and their backwards, add up on each rank alone."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Inside, ranks may have unequal numbers of batches (collective).

        Raises ArgumentError for other values than torch's defaults, and UsageError unless one
        optimizer has all parameters.
        """
        if not divide_by_initial_world_size or throw_on_early_termination:
            raise ArgumentError(
                "join() divides by the number of all ranks and lets ranks end early; leave out "
                "divide_by_initial_world_size=False and throw_on_early_termination=True",
                code="ddp-not-served",
            )
        if not enable or dearmpi.connect().size == 1:
            yield
            return
        with self._serve().joined():
            yield

    def join_hook(self, **_: Any) -> NoReturn:
        """Raise UsageError: torch's ``Join`` would run collectives of its own."""
        raise UsageError(
            "torch's Join cannot serve this model; write with model.join(): around the loop",
            code="ddp-not-served",
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Send gradients as torch's half-precision ``hook`` does; call it before the first step.

        Raises ConfigError for any other hook.
        """
        dtype = arguments.comm_dtype_of(hook)
        if dearmpi.connect().size > 1:
            self._serve().choose_comm_dtype(dtype)

    def synchronize(self) -> None:
        """Wait until every parameter shows the last step, also where it is read from a list."""
        if self._serving is not None:
            self._serving.wait()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a copy is served from its first training on."""
        return {**self.__dict__, "_serving": None}

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        return None

    @property
    def forward_sync_buffers(self) -> bool:
        """``broadcast_buffers`` by torch's newer name."""
        return self.broadcast_buffers

    @property
    def reducer(self) -> _Reducer:
        """What frameworks drive where they run a backward inside the forward."""
        return _Reducer(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _set_static_graph(self) -> None:
        """Graphs may change or not."""
        self.static_graph = True

    def _serve(self) -> ModelServing:
        if self._serving is None:
            self._serving = ModelServing(
                self,
                dearmpi.connect(),
                bucket_cap_mb=self._bucket_cap_mb,
                broadcasts=self.broadcast_buffers,
            )
            self._serving.synchronizes = self._synchronizes
            vars(self.module)["_dearmpi_serving"] = self._serving
        return self._serving


def _prepare(wrapper: nn.Module, _: Any) -> None:
    assert isinstance(wrapper, DistributedDataParallel)
    if is_dynamo_compiling():
        return
    if not torch.is_grad_enabled():
        if wrapper._serving is not None:
            wrapper._serving.prepare_evaluation()
        return
    if dearmpi.connect().size > 1 and (wrapper.training or wrapper._serving is not None):
        wrapper._serve().prepare()


leave_out(_prepare)


class _Reducer:
    """What frameworks call of torch's reducer.

    Lightning's manual optimization takes several backwards and steps in one wrapped forward. The
    first step of one optimizer ends the averager of the others, so each backward is prepared.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def prepare_for_backward(self, tensors: Sequence[Tensor]) -> None:
        _prepare(self._wrapper, None)

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is delayed: gradients are reduced as they come."""


def _moved(value: Any, device: torch.device) -> Any:
    """``value`` with the tensors in it on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return type(value)({key: _moved(item, device) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value
