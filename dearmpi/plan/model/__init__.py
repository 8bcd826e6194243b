"""How long things take: collectives, updates and layers, by formula or as measured. Begin with
`cost`. May import data.
"""
