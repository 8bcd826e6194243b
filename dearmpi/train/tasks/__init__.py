"""The built-in tasks, and tasks of the user's own by name. Begin with `task_registry`. May import
checkpoint.
"""
