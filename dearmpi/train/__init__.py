"""The trainer behind ``dear-train run``: tasks, data, checkpoints, metrics."""
