"""One row of metrics for each logged step, and where it is written. Begin with `metrics`. Imports
no other room.
"""
