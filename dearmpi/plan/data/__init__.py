"""Immutable data of a plan: layout, schedule, plan, workload, and how they are read from JSON.
Begin with `plan`; `schedule` is the order of reduce-scatters and gathers. Imports no other room.
"""
