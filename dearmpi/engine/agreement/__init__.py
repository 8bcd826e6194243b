"""What ranks compare while they train: the step agreement, ranks without data, and replicas. Begin
with `roll_call`. May import bucket and update.
"""
