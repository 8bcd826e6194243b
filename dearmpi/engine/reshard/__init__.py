"""From one plan to the next while training goes on: state and parameters move to other buckets.
Begin with `relocation`. May import bucket, device, iteration, state and update.
"""
