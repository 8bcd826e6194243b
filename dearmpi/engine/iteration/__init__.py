"""The moments of an iteration: torch's hooks, backward, the waits of forward, and the pipeline that
posts collectives. Begin with `engine`. May import agreement, bucket, codec, state, sync, trace
and update.
"""
