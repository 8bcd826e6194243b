"""Bound: what no plan for a model can beat, whatever its buckets and their order."""

from __future__ import annotations

from itertools import accumulate

from dearmpi.config import Gather
from dearmpi.plan.data.workload import Workload
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile


def least_iteration_s(
    profile: ModelProfile, costs: Costs, *, eager: bool, gather: Gather = "parameters"
) -> float:
    """Seconds that an iteration takes at least, by ``simulate``'s rules.

    The wire is one machine. A parameter's reduce-scatter is released when the backprop of the
    first layer k that uses it is over, at r(k); its all-gather must be over before that layer's
    feed-forward, after which f(k), the feed-forward from layer k on, is still to come. So all
    that belongs to layers 0 to k, both ways, lies between r(k) and the end less f(k):

        T >= r(k) + RS(0..k) + AG(0..k) + f(k)                                          for all k

    which is Jackson's bound for one machine with release times and tails, reached by any schedule
    that may cut operations anywhere and pays for no start-up (Carlier, 1982). Without eager
    updates gathers are released by the step at the end of backprop, and for k <= j

        T >= max(backprop, r(k) + RS(0..k)) + AG(0..j) + f(j)

    What a parameter cannot avoid by itself is a further bound: it is handed over, reduced, updated
    and gathered one after the other, in a bucket that has at least its size.
    """
    sizes, largest = _sizes_by_place(profile.workload)
    released = profile.backprop_stops_s()
    tails = [*accumulate(times.feed_forward_s for times in reversed(profile.times))][::-1]
    handed_s = costs.main_thread_s if any(sizes) else 0.0
    step_s = profile.backprop_s + handed_s
    waits = not eager and gather == "parameters"
    least, reduced_s, total = step_s + profile.feed_forward_s, 0.0, 0
    for place, size in enumerate(sizes):
        total += size
        reduce_s, gather_s = costs.reduce_scatter.wire_s(total), costs.all_gather.wire_s(total)
        reduced_s = max(reduced_s, released[place] + reduce_s)
        least = max(least, released[place] + reduce_s + gather_s + tails[place])
        if waits and total:
            least = max(least, max(step_s, reduced_s) + gather_s + tails[place])
        if size:
            chain_s = _chain_s(largest[place], costs, gather)
            least = max(least, released[place] + handed_s + chain_s + tails[place])
    return least


def _sizes_by_place(workload: Workload) -> tuple[list[int], list[int]]:
    """Bytes of all parameters that a layer is the first to use, and of the largest of them."""
    first_users = workload.first_users()
    sizes, largest = [0] * len(workload.layers), [0] * len(workload.layers)
    for spec in workload.params():
        if spec.trained:
            place = first_users[spec.name]
            sizes[place] += spec.nbytes
            largest[place] = max(largest[place], spec.nbytes)
    return sizes, largest


def _chain_s(nbytes: int, costs: Costs, gather: Gather) -> float:
    """One parameter on its way, undisturbed."""
    updated = nbytes / costs.world_size if gather == "parameters" else nbytes
    update_s = costs.update_s + costs.update_s_per_byte * updated
    return costs.reduce_scatter.alone_s(nbytes) + update_s + costs.all_gather.alone_s(nbytes)
