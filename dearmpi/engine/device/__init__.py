"""Tensors on an accelerator: streams, pinned host memory, and the way to MPI. Begin with `device`.
Imports no other room.
"""
