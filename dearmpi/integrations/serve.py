"""serve: what ``python -m dearmpi`` does, called by the script itself."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType

from dearmpi import World
from dearmpi.config import CommDtype, Compress, Gather, ScheduleName
from dearmpi.drop_in.serving import Chosen
from dearmpi.drop_in.start import serve_scripts
from dearmpi.errors import ConfigError


def serve(
    *,
    schedule: ScheduleName | None = None,
    gather: Gather | None = None,
    comm_dtype: CommDtype | None = None,
    compress: Compress | None = None,
) -> World:
    """Have the frameworks of this process train by dearmpi (collective the first time).

    Call it before the framework starts ``torch.distributed``. It sets the variables that torchrun
    sets, and puts dearmpi's ``DistributedDataParallel`` in place of torch's, also where torch's is
    already imported.

    schedule, gather, comm_dtype, compress: as in ``EngineConfig``, for every model that is wrapped
        later. None keeps what was chosen before, at first ``gather="gradients"`` and defaults.
    """
    now = Chosen.choices
    return serve_scripts(
        replace(
            now,
            schedule=schedule or now.schedule,
            gather=gather or now.gather,
            comm_dtype=comm_dtype or now.comm_dtype,
            compress=compress or now.compress,
        )
    )


def import_framework(name: str, package: str) -> ModuleType:
    """Return the module ``name``; raises ConfigError that names the ``package`` to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name} cannot be imported: {error}; pip install {package}", code="framework-missing"
        ) from error


def refuse(given: object, name: str) -> None:
    """Raise ConfigError if the setting ``name``, which does not go by DDP, is given."""
    if given:
        raise ConfigError(
            f"dearmpi trains whole models on every rank, without {name}; leave {name} out",
            code="ddp-not-served",
        )
