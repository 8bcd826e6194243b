"""Problem: why a method is out, in a line on which all ranks agree."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from dearmpi.bench.method import Method
from dearmpi.comm.world import World
from dearmpi.errors import CommError

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
    except (Exception, SystemExit) as error:  # somebody else's module, which may do anything
        return problem_of(error)
    return ""


def _is_aftermath(problem: str) -> bool:
    return any(words in problem.lower() for words in _AFTERMATH)
