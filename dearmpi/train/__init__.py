"""The trainer behind ``dear-train run``: settings, tasks, data, the loop, metrics and checkpoints.

Begin with `loop/session`, which sets a run up, and `loop/trainer`, which runs it.
`disk` looks at paths and writes files that survive a crash; every room may import it.
"""
