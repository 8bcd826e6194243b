"""The page of a run: its sections, and the file. Begin with `report`. May import all other rooms of
the report.
"""
