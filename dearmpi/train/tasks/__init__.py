"""The built-in tasks, and tasks of the user's own by name. Begin with `registry`. May import
checkpoint.
"""
