"""The lanes of a planned iteration, as `docs/explanation/planning.md` shows them."""

from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.search.planner import make_plan
from dearmpi.plan.simulate.timeline import simulate


def main() -> None:
    """Print it."""
    workload = read_workload("equal:50:12")
    profile = profile_workload(workload, feed_forward_s=0.2, backprop_s=0.4)
    link = LinkModel(alpha_s=0.5e-3, beta_s_per_byte=6e-9)
    costs = Costs(4, link, link, update_s=1e-3, main_thread_s=1e-4)
    plan = make_plan(profile, costs, world_size=4, eager=True)
    layout = plan.layout(workload.params(), 4)
    timeline = simulate(profile, layout, plan.conduct, costs)
    print(timeline.draw(columns=84))


if __name__ == "__main__":
    main()
