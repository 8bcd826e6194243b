"""The training loop: a job, its steps, evaluation, learning rate and saving. Begin with `trainer`.
May import data, metrics, ranks, settings, tasks and checkpoint.
"""
