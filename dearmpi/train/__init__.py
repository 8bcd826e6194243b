"""The trainer behind ``dear-train run``: settings, tasks, data, the loop, metrics and checkpoints.

Begin with `run/session`, which sets a run up, and `loop/trainer`, which runs it. `durable` writes
files that survive a crash, and `file_checks` looks at paths; every room may import both.
"""
