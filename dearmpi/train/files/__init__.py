"""Files that survive a crash, and what lies at a path. Begin with `durable`. Imports no
other room.
"""
