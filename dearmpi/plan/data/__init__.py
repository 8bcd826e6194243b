"""Immutable data of a plan: layout, schedule, plan, workload, and how they are read from JSON.
Begin with `plan`. Imports no other room.
"""
