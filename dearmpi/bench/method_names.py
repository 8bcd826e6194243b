"""Methods by name: reads ``--methods`` and ``--method`` and returns what to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from dearmpi.bench.method import (
    Entrant,
    Factory,
    Method,
    Setup,
    accept,
    asked_options,
    no_package,
    read_options,
)
from dearmpi.bench.own_methods import (
    ALONE,
    BAYES,
    OURS,
    PLANNED,
    alone,
    bayes,
    check_bayes,
    check_precision,
    ours,
    refuse_cap,
    refuse_settings,
)
from dearmpi.bench.third_party_methods import (
    HOROVOD_SENDS,
    deepspeed,
    deepspeed_config,
    find_deepspeed,
    find_horovod,
    horovod,
    horovod_variables,
)
from dearmpi.bench.torch_methods import (
    check_fsdp2,
    ddp,
    ddp_bf16,
    fsdp2,
    read_ddp,
    read_ddp_bf16,
    read_fsdp2,
)
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, engine_setting
from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Peer:
    """read: raises ConfigError for options that do not exist or fit; the factory reads by it, too.

    sends: in what it can be asked to send. options: those that its name implies. check, find: as
    those of a method.
    """

    factory: Factory
    read: Callable[[Mapping[str, str]], object]
    sends: tuple[str, ...] = engine_setting("comm_dtype").choices
    options: Mapping[str, str] = field(default_factory=dict)
    uses_group: bool = True
    check: Callable[[Setup], None] = accept
    find: Callable[[World], object] = no_package


_PEERS: Mapping[str, _Peer] = {
    "ddp": _Peer(ddp, read_ddp),
    "ddp-bf16": _Peer(
        ddp_bf16, read_ddp_bf16, sends=("fp32", "bf16"), options={"comm_dtype": "bf16"}
    ),
    "fsdp2": _Peer(fsdp2, read_fsdp2, sends=("fp32",), check=check_fsdp2),
    "deepspeed": _Peer(deepspeed, deepspeed_config, find=find_deepspeed),
    "horovod": _Peer(
        horovod, horovod_variables, sends=HOROVOD_SENDS, uses_group=False, find=find_horovod
    ),
}
METHOD_NAMES = (ALONE, *OURS, *_PEERS)


def read_method(text: str, *, comm_dtype: CommDtype = "fp32") -> Method:
    """The method ``NAME[:CAP_MB][:OPTION=VALUE...]``, NAME one of METHOD_NAMES.

    comm_dtype: in what it is to send, unless its own options say. Raises ConfigError for any other
    name, for options that it does not have, and for a method that is not made to send so.
    """
    name, *parts = text.split(":")
    if name not in METHOD_NAMES:
        raise ConfigError(
            f"there is no method {name!r}; choose from {', '.join(METHOD_NAMES)}, or give your own "
            "with --method module:factory",
            code="unknown-method",
        )
    if name == ALONE and parts:
        raise ConfigError(
            f"method {text!r}: alone has no options, since it sends nothing",
            code="unknown-method-option",
        )
    options = {**asked_options(comm_dtype), **read_options(parts, label=text)}
    _refuse_dtype(name, options, comm_dtype)
    try:
        return _make_method(name, text, options)
    except ConfigError as error:
        raise ConfigError(f"method {text!r}: {error}", code=error.code) from error


def _refuse_dtype(name: str, options: Mapping[str, str], comm_dtype: CommDtype) -> None:
    """Raise ConfigError for a peer that is not made to send as all methods are to."""
    is_asked = options.get("comm_dtype", "fp32") == comm_dtype
    if name in _PEERS and is_asked and comm_dtype not in _PEERS[name].sends:
        raise ConfigError(
            f"method {name} is not measured as {comm_dtype} here; leave it out, or give comm_dtype "
            f"to the others one by one, as in dear:comm_dtype={comm_dtype}",
            code="method-misfit",
        )


def _make_method(name: str, label: str, options: Mapping[str, str]) -> Method:
    """Raises ConfigError for wrong options here, before hours are spent on other methods."""
    if name == ALONE:
        return Method(label, alone, options, uses_group=False)
    if name in _PEERS:
        peer = _PEERS[name]
        options = {**peer.options, **options}
        peer.read(options)
        return Method(
            label,
            peer.factory,
            options,
            uses_group=peer.uses_group,
            check=peer.check,
            find=peer.find,
        )
    refuse_settings(name, options)
    if name == BAYES:
        refuse_cap(options)
    return Method(
        label,
        bayes if name == BAYES else ours(name),
        options,
        uses_group=False,
        waits_in_mpi=True,
        tunes_itself=name in (PLANNED, BAYES),
        check=check_bayes if name == BAYES else check_precision,
    )


def plug_in(text: str, *, comm_dtype: CommDtype = "fp32") -> Method:
    """The method of ``module:factory``, which is imported on every rank before anything is
    measured; the working folder is searched first.

    The factory takes a ``Setup`` and returns an ``Entrant``; ``torch.distributed`` is initialised.
    ``comm_dtype`` is among the setup's options, unless it is fp32.
    """
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(
            f"--method {text!r} is not of the form module:factory", code="malformed-value"
        )

    def find(world: World) -> None:
        with _working_folder() as folder:
            _import(module, attribute, folder)

    def enter(setup: Setup) -> Entrant:
        with _working_folder() as folder:
            return _import(module, attribute, folder)(setup)

    return Method(text, enter, asked_options(comm_dtype), find=find)


@contextmanager
def _working_folder() -> Iterator[str]:
    """Let modules in it be imported, as Python does for a script's own folder."""
    entry = str(Path.cwd())
    sys.path.insert(0, entry)
    try:
        yield entry
    finally:
        sys.path.remove(entry)


def _import(module: str, attribute: str, folder: str) -> Factory:
    try:
        factory: Factory = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}, neither installed nor in {folder}; install it, or start in its folder"
        ) from error
    return factory
