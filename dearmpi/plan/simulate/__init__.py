"""One iteration of a plan, simulated on a wire. Begin with `timeline`. May import data
and model.
"""
