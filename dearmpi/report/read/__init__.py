"""What the files of a run say: metrics, traces, and their first evaluation. Begin with `run_files`.
Imports no other room.
"""
