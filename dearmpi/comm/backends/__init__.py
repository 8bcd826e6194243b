"""Implementations of the collectives: MPI, the only file that imports mpi4py, and a world of one.
Begin with `mpi`. May import algorithms, api, process and watchdog.
"""
