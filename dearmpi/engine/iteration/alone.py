"""The engine of a world of one: the user's optimizer, undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine.agreement.join import Joining
from dearmpi.engine.agreement.step_agreement import Loads
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.trace.clock import IterationTimes
from dearmpi.engine.trace.span import Track
from dearmpi.engine.trace.spans import Spans


class AloneEngine:
    """What ``DistributedOptimizer`` asks of an engine, with nobody to talk to."""

    waited_s = 0.0

    def __init__(self, optimizer: Optimizer, spans: Spans) -> None:
        self._optimizer = optimizer
        self._spans = spans
        self.times = IterationTimes()
        self.joining = Joining(None)
        self.loads = Loads()

    def step(self, *, joined: bool = False) -> None:
        """Update."""
        with self._spans.span(Track.UPDATE, "update"):
            self._optimizer.step()

    def synchronize(self) -> None:
        """Parameters are always current."""

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Nothing is under way."""

    def drop_gradients(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are always local."""
        yield

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """There is nobody to wait for."""
        yield

    def next_clip(self) -> tuple[float, float] | None:
        """Nobody clips."""
        return None

    def wait_reduced(self) -> None:
        """Gradients are always reduced."""

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Copies of all gradients."""
        grads = ((param, param.grad) for param in self._params())
        return {param: grad.detach().clone() for param, grad in grads if grad is not None}

    def shards(self) -> list[Tensor]:
        """All gradients."""
        return [param.grad.detach() for param in self._params() if param.grad is not None]

    def has_gradients(self) -> bool:
        """Whether there are any, or all is frozen."""
        trained = [param for param in self._params() if param.requires_grad]
        return not trained or any(param.grad is not None for param in self._params())

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for grad in self.shards():
            grad.mul_(factor)

    def tell_replicas(self) -> None:
        """There are no replicas."""

    def idle_buckets(self) -> list[BucketRuntime]:
        """There are no buckets."""
        return []

    def close(self) -> None:
        """Nothing to give back."""

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]
