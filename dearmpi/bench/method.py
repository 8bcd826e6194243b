"""Method: one way to train a model on all ranks, and how it is found by its name."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import DEFAULT_DENSITY, SPARSE, CommDtype, check_choice
from dearmpi.errors import CommError, ConfigError

MOST_CAP_MB = 65536  # as the engine's own


class BenchOptimizer(Protocol):
    """What the benchmark needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Entrant:
    """A model made ready to be trained by one method.

    An iteration is ``zero_grad``, the loss of ``model``, ``backward`` of it, ``step``.
    is_tuning: whether it still tunes itself, in iterations before those that warm up; the same on
        all ranks.
    finish: make the parameters those of the last step. close: give back what was taken.
    describe: what it has chosen for itself, in half a line.
    """

    model: nn.Module
    optimizer: BenchOptimizer
    backward: Callable[[Tensor], object] = lambda loss: loss.backward()
    is_tuning: Callable[[], bool] = lambda: False
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    describe: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a method is given, the same on every rank but for the rank itself.

    make_optimizer: the optimizer for given parameters. options: what follows the method's name.
    """

    world: World
    model: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    options: Mapping[str, str] = field(default_factory=dict)


Factory = Callable[[Setup], Entrant]


@dataclass(frozen=True, slots=True)
class Method:
    """A method by name. label: as the user wrote it, options included.

    uses_group: ``torch.distributed`` is initialised over gloo before it enters, and taken down
        after it.
    waits_in_mpi: a rank of it that fails leaves the others waiting in this package's operations.
    tunes_itself: in iterations before those that warm up.
    period: iterations after which its work repeats; each counts as the mean of its block.
    progress: of how many averaged steps parameters show the work after a number of steps, at least
        and at most; None: of all.
    check: raises ConfigError where it cannot enter; without communication.
    find: raises, before anything is measured, where what it needs cannot be imported; all ranks
        call it, whatever the others meet.
    """

    label: str
    factory: Factory
    options: Mapping[str, str] = field(default_factory=dict)
    uses_group: bool = True
    waits_in_mpi: bool = False
    tunes_itself: bool = False
    period: int = 1
    progress: Callable[[int], tuple[float, float]] | None = None
    check: Callable[[Setup], object] = lambda setup: None
    find: Callable[[World], object] = lambda world: None

    @property
    def comm_dtype(self) -> CommDtype:
        """In what it sends fp32, as far as its options say; with compress auto bf16 at least."""
        if self.options.get("compress") == "auto":
            return "bf16"
        return cast(CommDtype, self.options.get("comm_dtype", "fp32"))

    @property
    def density(self) -> float:
        """The part of a gradient that it sends in a step, as far as its options say."""
        if self.options.get("compress") == "powersgd":
            return 0.5  # one side of each matrix in a step
        if self.options.get("compress") not in SPARSE:
            return 1.0
        return float(self.options.get("density", DEFAULT_DENSITY))

    def enter(self, setup: Setup) -> Entrant:
        """Make the model ready (collective)."""
        return self.factory(setup)


def asked_options(comm_dtype: CommDtype) -> dict[str, str]:
    """The options of a method that is to send ``comm_dtype``, as all are."""
    return {} if comm_dtype == "fp32" else {"comm_dtype": comm_dtype}


def read_options(parts: Iterable[str], *, label: str) -> dict[str, str]:
    """``["8", "window=3"]`` as ``{"cap": "8", "window": "3"}``. Raises ConfigError otherwise."""
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            name, value = "cap", part
        if not name or not value or name in options:
            raise ConfigError(
                f"method {label!r}: cannot read {part!r}; write NAME[:CAP_MB][:OPTION=VALUE]",
                code="malformed-value",
            )
        options[name] = value
    return options


def refuse_unknown(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise ConfigError for options that a method does not have; ``known`` are those it has."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"it has no option {', '.join(unknown)}; it has {', '.join(known)}",
            code="unknown-method-option",
        )


def read_flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Whether the option ``name`` is true. Raises ConfigError where it is not true or false."""
    text = options.get(name, str(default).lower())
    check_choice(name, text, ("true", "false"))
    return text == "true"


def read_cap(text: str) -> float:
    """A bucket cap in MiB. Raises ConfigError for what is none."""
    try:
        cap = float(text)
    except ValueError:
        cap = math.nan
    if not 0 <= cap <= MOST_CAP_MB:
        raise ConfigError(
            f"the bucket cap is {text!r}; it must be a number of MiB, 0 or more and at most "
            f"{MOST_CAP_MB}",
            code="malformed-value",
        )
    return cap


# Found in what a rank says that only lost the others: gloo's connections, or Horovod's thread.
_AFTERMATH = ("gloo", "horovod has been shut down")


def problem_of(error: BaseException) -> str:
    """What went wrong on this rank, in a line; what the error holds, such as a model, is let go."""
    lines = str(error).strip().splitlines()
    traceback.clear_frames(error.__traceback__)
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def agree_on(world: World, problem: str) -> str:
    """The problem that came first, as far as one can tell, with its rank; empty where no rank has
    any (collective).
    """
    problems = {rank: text for rank, text in enumerate(world.all_gather_text(problem)) if text}
    if not problems:
        return ""
    first = min(problems, key=lambda rank: (_is_aftermath(problems[rank]), rank))
    return problems[first] if world.size == 1 else f"rank {first}: {problems[first]}"


def find_missing(
    world: World, methods: Sequence[Method], tell: Callable[[str], None]
) -> dict[str, str]:
    """By label, why a method that cannot be found on every rank is out (collective). ``tell`` is
    given a line on each: measuring the others takes long.
    """
    missing: dict[str, str] = {}
    for method in methods:
        problem = agree_on(world, _look_for(world, method))
        if problem:
            missing[method.label] = problem
            tell(f"{method.label} is out: {problem}")
    return missing


def _look_for(world: World, method: Method) -> str:
    try:
        method.find(world)
    except CommError:
        raise  # nothing can go on
    except (Exception, SystemExit) as error:  # another package's code may raise anything
        return problem_of(error)
    return ""


def _is_aftermath(problem: str) -> bool:
    return any(words in problem.lower() for words in _AFTERMATH)
