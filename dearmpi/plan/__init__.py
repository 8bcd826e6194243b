"""Plans: immutable data built by pure functions. Needs nothing but the standard library.

Begin with `data`: which parameters share a bucket, and in `schedule` the order of reduce-scatters
and gathers. `model` has what they cost, `simulate` an iteration, `search` the planner, and `rivals`
other systems.
"""
