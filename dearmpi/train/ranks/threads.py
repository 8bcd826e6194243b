"""Threads: how many cores torch may use in each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dearmpi.train.ranks.agreement import TextWorld

ROOM_FROM = 4  # with fewer cores a rank computes on all of them; the progress thread mostly sleeps


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """How many threads, and why, for people to read.

    warnings: a line for each host whose ranks compute on more threads than they have cores there.
    """

    count: int
    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankCores:
    """The cores that a rank may run on, and how many threads it computes with."""

    host: str
    cores: Sequence[int]
    num_threads: int


@dataclass(frozen=True, slots=True)
class HostCores:
    """The ranks of one host together. num_cores: cores that any of these ranks may run on."""

    name: str
    num_ranks: int
    num_cores: int
    num_threads: int


def share_of_cores(own: Iterable[int], others: Sequence[Iterable[int]], *, num_helpers: int) -> int:
    """Cores for this rank's computation, at least 1.

    own: the cores that this rank may run on. others: the cores of each other rank on its host; a
    rank that shares none of ``own`` does not count. num_helpers: threads and processes beside
    the computation, which need one each where there is room.
    """
    mine = set(own)
    sharers = 1 + sum(1 for other in others if mine & set(other))
    share = max(1, len(mine) // sharers)
    return max(1, share - num_helpers) if share >= ROOM_FROM else share


def choose_threads(
    world: TextWorld,
    *,
    requested: int | None,
    progress_thread: bool,
    num_workers: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> ThreadChoice:
    """Decide and set torch's threads in this rank (collective).

    num_workers: processes beside each rank that load samples for it.
    """
    cores = sorted(os.sched_getaffinity(0))
    masks = [json.loads(text) for text in world.all_gather_text(json.dumps([world.host, cores]))]
    neighbours = [
        mask for rank, (host, mask) in enumerate(masks) if host == world.host and rank != world.rank
    ]
    preset = environment.get("OMP_NUM_THREADS", "")
    if requested is not None:
        choice = ThreadChoice(requested, "as asked for")
    elif preset.isdigit() and int(preset) > 0:
        choice = ThreadChoice(int(preset), "from OMP_NUM_THREADS")
    else:
        count = share_of_cores(cores, neighbours, num_helpers=int(progress_thread) + num_workers)
        reason = f"cores: {len(cores)}, ranks on this host: {len(neighbours) + 1}"
        if count < share_of_cores(cores, neighbours, num_helpers=0):
            reason += _describe_left(progress_thread, num_workers)
        choice = ThreadChoice(count, reason)
    torch.set_num_threads(choice.count)
    gathered = world.all_gather_text(json.dumps([world.host, cores, choice.count]))
    return replace(
        choice, warnings=find_crowded([RankCores(*json.loads(text)) for text in gathered])
    )


def _describe_left(progress_thread: bool, num_workers: int) -> str:
    if not num_workers:
        return ", one core of each left to communication"
    return f", others of each left to {'communication and ' if progress_thread else ''}loading"


def find_crowded(ranks: Iterable[RankCores]) -> tuple[str, ...]:
    """A warning for each host with more threads than cores, over all of its ranks."""
    return tuple(
        f"warning: ranks on {one.name}: {one.num_ranks}, their threads: {one.num_threads}, cores "
        f"they may use: {one.num_cores}; they will wait for each other: start fewer ranks there, "
        "give them more cores, or lower --threads"
        for one in by_host(ranks)
        if one.num_threads > one.num_cores
    )


def by_host(ranks: Iterable[RankCores]) -> list[HostCores]:
    """Each host once, in the order of their first ranks."""
    members: dict[str, list[RankCores]] = {}
    for rank in ranks:
        members.setdefault(rank.host, []).append(rank)
    return [
        HostCores(
            host,
            num_ranks=len(own),
            num_cores=len({core for rank in own for core in rank.cores}),
            num_threads=sum(rank.num_threads for rank in own),
        )
        for host, own in members.items()
    ]
