"""What all rooms share: buffers, requests and the collectives of a library, the name of a call, and
output that cannot fail. Begin with `collectives`. Imports no other room.
"""
