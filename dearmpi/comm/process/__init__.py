"""This process and its launcher: ranks before MPI starts, worker processes, exit handlers,
deadlines. Begin with `launch`. May import watchdog.
"""
