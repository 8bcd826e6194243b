"""A run on disk and how it starts: its folder, environment, plan and trace. Begin with `session`.
May import all other rooms of the trainer.
"""
