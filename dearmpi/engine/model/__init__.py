"""What the engine needs to know of a user's model: names of tensors, shared memory, wrappers and
modules that are refused. Begin with `model_tensors`. May import bucket.
"""
