"""Values of the model that are no gradients: rank 0's parameters, buffers, batch statistics. Begin
with `broadcast`. May import agreement, bucket, device and model.
"""
