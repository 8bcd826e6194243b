"""From an optimizer, a model and settings to an engine in use, and to the next one where buckets
change. Begin with `build`, which makes the parts in order. May import all other rooms.
"""
