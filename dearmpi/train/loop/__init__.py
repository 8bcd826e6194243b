"""The training loop: how a run starts, its job, steps, evaluation, learning rate and plan. Begin
with `session` and `trainer`. May import all other rooms of the trainer.
"""
