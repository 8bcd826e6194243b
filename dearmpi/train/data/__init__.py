"""Which samples each rank uses in each step, and their loading ahead of time. Begin with `data`.
May import ranks and tasks.
"""
