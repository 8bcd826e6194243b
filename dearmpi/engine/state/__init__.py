"""The optimizer's state: sharded, gathered and as torch saves it. Begin with `sharded_state`. May
import bucket, device, probe and update.
"""
