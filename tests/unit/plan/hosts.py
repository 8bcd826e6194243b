"""Four hosts at 1 Gbit/s, and models whose communication takes so long beside computation there."""

from __future__ import annotations

from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile, profile_workload

GIGABIT = LinkModel(5e-4, 0.75 * 8e-9)
HOSTS = Costs(4, GIGABIT, GIGABIT, update_s=1e-3, main_thread_s=1e-4)


def paper(name: str, ratio: float) -> ModelProfile:
    """A model of the paper on 4 hosts at 1 Gbit/s, communication ``ratio`` times computation."""
    workload = read_workload(name)
    nbytes = 4 * workload.num_parameters
    compute_s = (GIGABIT.wire_s(nbytes) + GIGABIT.wire_s(nbytes)) / ratio
    return profile_workload(workload, feed_forward_s=compute_s / 3, backprop_s=compute_s * 2 / 3)
