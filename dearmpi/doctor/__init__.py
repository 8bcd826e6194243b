"""What is wrong with this machine, its MPI and its network, and what cures it. Begin with
`examination`; a check returns a `finding`.
"""
