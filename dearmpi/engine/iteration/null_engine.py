"""The engine where nothing is communicated: in a world of one, and after ``close()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.engine.agreement.join import Joining
from dearmpi.engine.agreement.step_agreement import Loads
from dearmpi.engine.codec.codec import Codecs
from dearmpi.engine.trace.spans import IterationTimes, Spans
from dearmpi.errors import UsageError
from dearmpi.span import Track


class NullEngine:
    """What ``DistributedOptimizer`` calls of an engine, on the wrapped optimizer alone.

    A closed one refuses to train: that would go on without the other ranks. Parameters are current
    and stay so.
    """

    waited_s = 0.0
    num_checked = num_steps = 0
    codecs = Codecs((), (), CollectiveAlgorithms("ring"))

    def __init__(
        self, optimizer: Optimizer, spans: Spans, *, closed_after: IterationTimes | None = None
    ) -> None:
        """``closed_after``: the times of the last iteration of an engine that was closed."""
        self._optimizer, self._spans = optimizer, spans
        self.is_closed = closed_after is not None
        self.times = closed_after or IterationTimes()
        self.joining = Joining(None)
        self.loads = Loads()
        self.after_backprop: Callable[[], None] | None = None

    def step(self, *, exhausted: bool = False) -> None:
        """Update."""
        self._refuse_if_closed("step()")
        with self._spans.span(Track.UPDATE, "update"):
            self._optimizer.step()

    def synchronize(self) -> None:
        """Parameters are always current."""

    def settle(self) -> None:
        """Nothing is left to send."""

    def forget_unsent(self) -> None:
        """Nothing is left to send."""

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Nothing is left to send."""

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Nothing is under way."""

    def discard_grads(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are always local."""
        self._refuse_if_closed("no_sync()")
        yield

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """There is no other rank to wait for."""
        yield

    def announce_forward(self) -> bool:
        """No other rank asks."""
        return False

    def leave_gradients(self) -> None:
        """Gradients are plain tensors."""

    def next_clip(self) -> tuple[float, float] | None:
        """No other rank clips."""
        return None

    def wait_reduced(self, norm_type: float = 2.0) -> None:
        """Gradients are always reduced."""
        self._refuse_if_closed("reducing gradients")

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Copies of all gradients."""
        self._refuse_if_closed("reading gradients")
        grads = ((param, param.grad) for param in self._params())
        return {param: grad.detach().clone() for param, grad in grads if grad is not None}

    def keep_gradients(self) -> None:
        """Gradients are the script's own."""

    def complete_gradients(self) -> None:
        """There are no other ranks."""

    def find_unused(self) -> Mapping[int, frozenset[int]]:
        """Nothing is left to send."""
        return {}

    def shards(self, unused: object = None) -> list[Tensor]:
        """All gradients."""
        self._refuse_if_closed("reading gradients")
        return [param.grad.detach() for param in self._params() if param.grad is not None]

    def has_gradients(self) -> bool:
        """Whether there are any, or all is frozen."""
        trained = [param for param in self._params() if param.requires_grad]
        return not trained or any(param.grad is not None for param in self._params())

    def scale_gradients(self, factor: float, unused: object = None) -> None:
        """Multiply all gradients."""
        for grad in self.shards():
            grad.mul_(factor)

    def check_replicas(self, describe_options: Callable[[], str]) -> None:
        """There are no replicas."""

    def compare_replicas(self) -> None:
        """There are no replicas."""

    def check_changeable(self, what: str) -> None:
        """Raise UsageError for ``what`` inside ``join``, and after ``close``."""
        self._refuse_if_closed(what)
        self.joining.refuse(what)

    def close(self) -> None:
        """Nothing to give back."""

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _refuse_if_closed(self, what: str) -> None:
        if self.is_closed:
            raise UsageError(
                f"{what} after close(): this DistributedOptimizer is detached from its model; "
                "make a new one",
                code="optimizer-closed",
            )
