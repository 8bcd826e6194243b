"""How a reduce-scatter and an all-gather are made: rings, pairwise exchange, the library's own, and
the trial that picks one. Begin with `algorithms`. May import api, progress and the world.
"""
