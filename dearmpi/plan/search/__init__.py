"""From a profile to the plan of least simulated time. Begin with `planner`. May import data, model
and simulate.
"""
