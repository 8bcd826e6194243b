"""What does the wrapper of ``python -m dearmpi`` cost beside ``DistributedOptimizer``?

    bin/netlab run 4 dear-train bench --workload resnet50 --ratio 1 \\
        --methods dear:eager=false,dear:eager=false:gather=gradients \\
        --method benchmarks.drop_in:wrapped --method benchmarks.drop_in:sharded

Methods of ``dear-train bench``, which measures them in turns on replayed computation. ``wrapped``
is what an unchanged script gets, ``sharded`` the same with ``--gather parameters``. Their equals
with ``DistributedOptimizer`` are in the second line.
"""

from __future__ import annotations

from torch.optim import Optimizer

from dearmpi import DistributedDataParallel
from dearmpi.bench.method import Entrant, Setup
from dearmpi.config import EngineConfig, Gather
from dearmpi.drop_in.served_optimizer import KnownOptimizers
from dearmpi.drop_in.serving import Chosen


def wrapped(setup: Setup) -> Entrant:
    """A script for DistributedDataParallel, with the settings it has by default."""
    return _enter(setup, "gradients")


def sharded(setup: Setup) -> Entrant:
    """The same with ``--gather parameters``."""
    return _enter(setup, "parameters")


def _enter(setup: Setup, gather: Gather) -> Entrant:
    Chosen.choices = EngineConfig(gather=gather)  # holds for models that are wrapped from now on
    model = DistributedDataParallel(setup.model)
    optimizer = setup.make_optimizer(model.parameters())
    return Entrant(model, optimizer, finish=model.synchronize, close=lambda: _leave(optimizer))


def _leave(optimizer: Optimizer) -> None:
    """Have the engines behind the optimizer closed, so that the next method has the network."""
    for serving in KnownOptimizers.models_of(optimizer):
        for served in list(serving.engines):
            served.release()
        serving.stop_averager()
