"""How a reduce-scatter and an all-gather are carried out, and which algorithm is fastest. Begin
with `algorithm`; `registry` lists them all. May import api, progress and the world.
"""
