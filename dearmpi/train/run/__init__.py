"""A run, whatever its loop: folder, environment, steps, checkpoints, trace. Begin with
`script_run`, which is what a script of one's own sees. May import all other rooms but the loop.
"""
