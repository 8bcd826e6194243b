"""What other systems would do with the same model and network: DDP, Horovod, MG-WFBP,
ByteScheduler, and the paper's table. Begin with `side_by_side`. May import all other rooms of the
plan.
"""
