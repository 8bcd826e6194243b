"""A bucket at run time: its state, its flat buffers, and which of its gradients have come. Begin
with `bucket`, where a gradient enters. Imports no other room.
"""
