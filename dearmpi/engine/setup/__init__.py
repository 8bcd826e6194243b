"""From an optimizer, a model and settings to an engine in use, and to the next one where buckets
change. Begin with `live_engine`. May import all other rooms of the engine.
"""
