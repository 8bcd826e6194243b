"""From optimizer, model and settings to an engine, and from one engine to the next. Begin with
`attachment`. May import all other rooms of the engine.
"""
