"""What ranks share beside gradients: rank 0's parameters, the model's buffers, batch statistics.
Also models that are refused. Begin with `model_tensors`. May import agreement and bucket.
"""
