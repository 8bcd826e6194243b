"""This process and its launcher: ranks before MPI starts, worker processes, and how a process ends.
Begin with `launch`. May import api and watchdog.
"""
