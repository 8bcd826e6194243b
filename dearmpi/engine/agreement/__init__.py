"""What ranks compare while they train: the step agreement, ranks without data, and replicas. Begin
with `step_agreement`. May import bucket and update.
"""
