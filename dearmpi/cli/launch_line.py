"""Launch line: a command of mpirun or srun, taken apart so that it can start on other hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file

Kind = Literal["hydra", "openmpi", "srun"]
_ASK_S = 30.0  # for the version of a launcher, and SLURM's list of hosts

# Options, without dashes, that are followed by a word of their own, or by two.
_ONE: Mapping[Kind, str] = {
    "hydra": "n np ppn perhost f hostfile machinefile hosts host hostlist rankmap genvlist envlist "
    "wdir configfile memory-alloc-kinds launcher launcher-exec bootstrap bootstrap-exec rmk "
    "topolib bind-to map-by membind demux errfile-pattern outfile-pattern gpus-per-proc "
    "gpu-subdevs-per-proc iface localhost nameserver prepend-pattern usize",
    "openmpi": "n np c N H host hostfile machinefile default-hostfile npernode map-by bind-to "
    "rank-by x wdir wd path prefix rankfile output display timeout stdin personality tune am "
    "cpu-list cpu-set runtime-options",
    "srun": "n ntasks N nodes w nodelist c cpus-per-task ntasks-per-node p partition A account J "
    "job-name t time mem G gpus m distribution D chdir e error i input o output x exclude mpi W "
    "wait K kill-on-bad-exit",
}
_TWO: Mapping[Kind, str] = {
    "hydra": "genv env",
    "openmpi": "mca prtemca pmixmca omca gmca",
    "srun": "",
}
# What says how many ranks there are and where; written anew for other hosts.
_COUNTS: Mapping[Kind, frozenset[str]] = {
    "hydra": frozenset({"n", "np"}),
    "openmpi": frozenset({"n", "np", "c"}),
    "srun": frozenset({"n", "ntasks"}),
}
_HOSTS: Mapping[Kind, frozenset[str]] = {
    "hydra": frozenset({"hosts", "host", "hostlist"}),
    "openmpi": frozenset({"H", "host"}),
    "srun": frozenset({"w", "nodelist"}),
}
_FILES: Mapping[Kind, frozenset[str]] = {
    "hydra": frozenset({"f", "hostfile", "machinefile"}),
    "openmpi": frozenset({"hostfile", "machinefile", "default-hostfile"}),
    "srun": frozenset(),
}
_PER_HOST: Mapping[Kind, frozenset[str]] = {
    "hydra": frozenset({"ppn", "perhost"}),
    "openmpi": frozenset({"N", "npernode"}),
    "srun": frozenset({"ntasks-per-node"}),
}
JOB, START = "DEARMPI_JOB", "DEARMPI_START"  # tell ranks of which job and start they are
_EXPORTS = ("-x", JOB, "-x", START)  # Open MPI takes nothing else along


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A launcher with its options, and the program that its ranks run.

    given: the whole command as it was given.
    options: without those that say how many ranks there are, and on which hosts.
    ranks: for each host, in order, how many ranks it has; empty where the hosts are not known.
    """

    launcher: str
    kind: Kind
    given: tuple[str, ...]
    options: tuple[str, ...]
    program: tuple[str, ...]
    ranks: Mapping[str, int]

    def on(self, hosts: Sequence[str]) -> list[str]:
        """The command that starts each host's ranks on ``hosts``, those of ``ranks``."""
        return self._start({host: self.ranks[host] for host in hosts}, self.program)

    def probe(self, host: str) -> list[str]:
        """The command that starts ``true`` on ``host``, by the same way."""
        return self._start({host: 1}, ("true",))

    def _start(self, ranks: Mapping[str, int], program: Sequence[str]) -> list[str]:
        count = str(sum(ranks.values()))
        if self.kind == "srun":
            where = [f"--nodelist={','.join(ranks)}", f"--nodes={len(ranks)}", f"--ntasks={count}"]
            return [self.launcher, *self.options, *where, *program]
        name = "-hosts" if self.kind == "hydra" else "--host"
        listed = ",".join(f"{host}:{number}" for host, number in ranks.items())
        return [self.launcher, name, listed, "-n", count, *self.options, *program]


def read_launch_line(command: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    """Take ``command`` apart: a launcher, its options, perhaps ``--``, and the program.

    Hosts are those that the options name, else those of the job in SLURM, PBS or LSF. Raises
    ConfigError where the program cannot be told from the options, and for hosts or numbers that no
    launcher takes.
    """
    launcher, *words = command
    kind = _kind_of(launcher)
    options, program = _split(kind, words)
    kept: list[str] = []
    listed: list[tuple[str, int | None]] = []
    count: int | None = None
    per_host: int | None = None
    for option in options:
        name, value = _name_of(kind, option[0]), _value_of(kind, option)
        if name in _COUNTS[kind]:
            count = _number(option[0], value)
        elif name in _HOSTS[kind]:
            listed += _read_hosts(kind, value)
        elif name in _FILES[kind]:
            listed += _read_file(value)
        elif name in _PER_HOST[kind]:
            per_host = _number(option[0], value)
        elif kind != "srun" or name not in ("N", "nodes"):
            kept += option
    exports = _EXPORTS if kind == "openmpi" else ()
    return LaunchLine(
        launcher,
        kind,
        given=(launcher, *exports, *chain(*options), *program),
        options=(*exports, *kept),
        program=program,
        ranks=_place(listed or _allocated(kind, environment), count, per_host),
    )


def _kind_of(launcher: str) -> Kind:
    name = os.path.basename(launcher)
    if name == "srun":
        return "srun"
    said = _ask(launcher, "--version")
    if "Open MPI" in said or "OpenRTE" in said:
        return "openmpi"
    if "HYDRA" in said or "Intel(R) MPI" in said:
        return "hydra"
    raise ConfigError(
        f"{launcher} is neither MPICH's mpirun, Open MPI's, nor srun; give their command, with its "
        "options and the program, such as mpirun -n 8 dear-train run",
        code="unknown-choice",
    )


def _ask(*command: str) -> str:
    """What ``command`` prints. Raises ConfigError where it cannot be started or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {_ASK_S:g} s"
        raise ConfigError(
            f"cannot start {' '.join(command)}: {reason}; give the path of mpirun or srun",
            code="command-not-started",
        ) from error
    return done.stdout


def _split(kind: Kind, words: Sequence[str]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Each option with its words, and the program with its arguments."""
    options: list[tuple[str, ...]] = []
    index = 0
    while index < len(words) and words[index] != "--":
        word = words[index]
        taken = 1
        if not word.startswith("-"):
            if shutil.which(word) is not None or "--" not in words[index:] or not options:
                break
            options[-1] += (word,)  # of an option that is not known here
        elif "=" in word or _is_joined(kind, word):  # as --ntasks=4 and srun's -n4
            options.append((word,))
        else:
            name = _name_of(kind, word)
            taken += 2 if name in _TWO[kind].split() else name in _ONE[kind].split()
            options.append(tuple(words[index : index + taken]))
        index += taken
    separated = index < len(words) and words[index] == "--"
    program = tuple(words[index + separated :])
    if not program or not separated and shutil.which(program[0]) is None:
        found = f"{program[0]!r}, which is no program here" if program else "no program"
        raise ConfigError(
            f"after the launcher's options stands {found}; write -- between the options and the "
            "program, as in mpirun -n 8 -- dear-train run",
            code="command-not-started",
        )
    if ":" in program:
        raise ConfigError(
            "the command starts several programs, joined by ':'; give one that all ranks run",
            code="settings-contradict",
        )
    return options, program


def _is_joined(kind: Kind, word: str) -> bool:
    return kind == "srun" and re.fullmatch(r"-\w.+", word) is not None


def _name_of(kind: Kind, word: str) -> str:
    """An option's name, without dashes and value."""
    if _is_joined(kind, word):
        return word[1]
    return word.partition("=")[0].removeprefix("-").removeprefix("-")


def _value_of(kind: Kind, option: Sequence[str]) -> str:
    word = option[-1]
    if len(option) > 1:
        return word
    return word[2:].removeprefix("=") if _is_joined(kind, word) else word.partition("=")[2]


def _number(option: str, value: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", value):
        raise ConfigError(
            f"{option} is {value!r}; give a number of ranks, 1 or more", code="malformed-value"
        )
    return int(value)


def _read_hosts(kind: Kind, text: str) -> list[tuple[str, int | None]]:
    if kind == "srun":
        return [(host, None) for host in _ask("scontrol", "show", "hostnames", text).split()]
    return [_read_host(host) for host in text.split(",")]


def _read_host(text: str) -> tuple[str, int | None]:
    host, colon, count = text.strip().partition(":")
    if not host:
        raise ConfigError(
            "the list of hosts has an empty name; write it as n0,n1 or n0:2,n1:2",
            code="malformed-value",
        )
    return host, _number(f"host {host}", count) if colon else None


def _read_file(path: str) -> list[tuple[str, int | None]]:
    """Hosts of a file, by the lines ``n0``, ``n0:2`` or ``n0 slots=2``."""
    try:
        with regular_file(path).open(encoding="utf-8") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise ConfigError(
            f"cannot read the hosts in {path}: {reason}; name a file with a host in each line",
            code="file-missing",
        ) from error
    hosts = []
    for first, *others in filter(None, lines):
        host, count = _read_host(first)
        for other in others:
            name, _, value = other.partition("=")
            count = _number(f"slots of {host}", value) if name == "slots" else count
        hosts.append((host, count))
    if not hosts:
        raise ConfigError(
            f"the file of hosts {path} names none; write a host in each line",
            code="malformed-value",
        )
    return hosts


def _allocated(kind: Kind, environment: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Hosts of MPICH's variable, or of the job in SLURM, PBS or LSF with its places on each; else
    none.
    """
    if kind == "hydra" and environment.get("HYDRA_HOST_FILE"):
        return _read_file(environment["HYDRA_HOST_FILE"])
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return [] if kind == "srun" else _in_other_queues(environment)
    hosts = _ask("scontrol", "show", "hostnames", nodes).split()
    counts: list[int | None] = []
    for count, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_TASKS_PER_NODE", "")
    ):
        counts += [int(count)] * int(times or 1)
    counts += [None] * (len(hosts) - len(counts))
    return list(zip(hosts, counts, strict=False))


# Of PBS and LSF: a file with a line for each place of a host.
_QUEUE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")


def _in_other_queues(environment: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Hosts of a job in PBS or LSF, each as often as it has places; else none."""
    for name in _QUEUE_FILES:
        if environment.get(name):
            return _read_file(environment[name])
    return [(host, None) for host in environment.get("LSB_HOSTS", "").split()]


def _place(
    listed: Iterable[tuple[str, int | None]], count: int | None, per_host: int | None
) -> dict[str, int]:
    """How many of ``count`` ranks each host has: its room in turn, and again while ranks are left.

    A host without a number has an equal share, or one rank where no number of ranks is given.
    """
    listed = list(listed)
    hosts = dict.fromkeys(host for host, _ in listed)
    share = -(-count // len(hosts)) if count and hosts else 1
    repeated = len(hosts) < len(listed)
    room = dict.fromkeys(hosts, 0)
    for host, own in listed:
        room[host] += own or (1 if repeated else share)
    if per_host:
        room = dict.fromkeys(hosts, per_host)
    if count is None:
        return room
    ranks = dict.fromkeys(hosts, 0)
    while ranks and sum(ranks.values()) < count:
        for host, most in room.items():
            ranks[host] += min(most, count - sum(ranks.values()))
    return {host: number for host, number in ranks.items() if number}
