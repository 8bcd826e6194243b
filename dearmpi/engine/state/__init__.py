"""The optimizer's state: gathered, sharded, loaded, sent to new owners, and its options. Begin with
`sharded_state`. May import bucket, probe, sync and update.
"""
