"""Strategies for Lightning's Trainer and Fabric, under mpirun."""

from __future__ import annotations

from typing import Any

from dearmpi.config import CommDtype, Gather, ScheduleName
from dearmpi.integrations.serve import import_framework, refuse, serve

_trainer = import_framework("lightning.pytorch.strategies", "lightning")
_fabric = import_framework("lightning.fabric.strategies", "lightning")
_environments = import_framework("lightning.fabric.plugins.environments", "lightning")


class _Serving:
    """What both strategies add to Lightning's DDP."""

    def __init__(
        self,
        *args: Any,
        schedule: ScheduleName | None = None,
        gather: Gather | None = None,
        comm_dtype: CommDtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of Lightning's DDPStrategy, and those of ``serve`` (collective).

        Raises ConfigError for periodic averaging of models.
        """
        refuse(kwargs.get("model_averaging_period"), "model_averaging_period")
        serve(schedule=schedule, gather=gather, comm_dtype=comm_dtype)
        kwargs.setdefault("cluster_environment", _environments.TorchElasticEnvironment())
        super().__init__(*args, **kwargs)


class DearStrategy(_Serving, _trainer.DDPStrategy):  # type: ignore[misc,name-defined]
    """For ``Trainer(strategy=DearStrategy(), devices=..., num_nodes=...)``.

    devices: the ranks of a host. num_nodes: the hosts.
    """


class DearFabricStrategy(_Serving, _fabric.DDPStrategy):  # type: ignore[misc,name-defined]
    """For ``Fabric(strategy=DearFabricStrategy(), devices=..., num_nodes=...)``; then ``launch()``.

    devices: the ranks of a host. num_nodes: the hosts.
    """
