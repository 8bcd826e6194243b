"""What the engine, the world and the MPI backends have in common: buffers, requests, chains of
operations, a rank's shard, and the name of a call. Begin with `collectives`. Imports no other room.
"""
