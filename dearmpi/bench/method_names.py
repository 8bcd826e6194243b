"""Methods by name: reads ``--methods`` and ``--method`` and returns what to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from dearmpi.bench.method import (
    Entrant,
    Factory,
    Method,
    Setup,
    asked_options,
    read_options,
)
from dearmpi.bench.own_methods import (
    ALONE,
    BAYES,
    LOCAL,
    OURS,
    PLANNED,
    alone,
    bayes,
    check_bayes,
    check_precision,
    local_method,
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
    ddp_localsgd,
    ddp_powersgd,
    fsdp2,
    read_ddp,
    read_ddp_bf16,
    read_ddp_localsgd,
    read_ddp_powersgd,
    read_fsdp2,
)
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, engine_setting
from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _OtherMethod:
    """method: under its name, with the options that the name implies. sends: what it can send.

    read: raises ConfigError for options that do not exist or fit; the factory reads by it, too.
    period: by its options, as a method's.
    """

    method: Method
    read: Callable[[Mapping[str, str]], object]
    sends: tuple[str, ...] = engine_setting("comm_dtype").choices
    period: Callable[[Mapping[str, str]], int] = lambda options: 1


_OTHER_METHODS: Mapping[str, _OtherMethod] = {
    other.method.label: other
    for other in (
        _OtherMethod(Method("ddp", ddp), read_ddp),
        _OtherMethod(
            Method("ddp-bf16", ddp_bf16, {"comm_dtype": "bf16"}), read_ddp_bf16, ("fp32", "bf16")
        ),
        _OtherMethod(
            Method("ddp-localsgd", ddp_localsgd),
            read_ddp_localsgd,
            ("fp32",),
            period=read_ddp_localsgd,
        ),
        _OtherMethod(Method("ddp-powersgd", ddp_powersgd), read_ddp_powersgd, ("fp32",)),
        _OtherMethod(Method("fsdp2", fsdp2, check=check_fsdp2), read_fsdp2, ("fp32",)),
        _OtherMethod(Method("deepspeed", deepspeed, find=find_deepspeed), deepspeed_config),
        _OtherMethod(
            Method("horovod", horovod, uses_group=False, find=find_horovod),
            horovod_variables,
            HOROVOD_SENDS,
        ),
    )
}
METHOD_NAMES = (ALONE, *OURS, *_OTHER_METHODS)


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
    """Raise ConfigError for another method that is not made to send as all methods are to."""
    is_asked = options.get("comm_dtype", "fp32") == comm_dtype
    if name in _OTHER_METHODS and is_asked and comm_dtype not in _OTHER_METHODS[name].sends:
        raise ConfigError(
            f"method {name} is not measured as {comm_dtype} here; leave it out, or give comm_dtype "
            f"to the others one by one, as in dear:comm_dtype={comm_dtype}",
            code="method-misfit",
        )


def _make_method(name: str, label: str, options: Mapping[str, str]) -> Method:
    """Raises ConfigError for wrong options here, before hours are spent on other methods."""
    if name == ALONE:
        return Method(label, alone, options, uses_group=False)
    if name in _OTHER_METHODS:
        other = _OTHER_METHODS[name]
        options = {**other.method.options, **options}
        other.read(options)
        return replace(other.method, label=label, options=options, period=other.period(options))
    if name == LOCAL:
        return local_method(label, options)
    refuse_settings(name, options)
    if name == BAYES:
        refuse_cap(options)
    return Method(
        label,
        bayes if name == BAYES else ours(name),
        options,
        uses_group=False,
        waits_in_mpi=True,
        tunes_itself=name in (PLANNED, BAYES) or options.get("compress") == "auto",
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
            f"--method {text!r} is not of the form module:factory; write it like "
            "package.module:make_method",
            code="malformed-value",
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
