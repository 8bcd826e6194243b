"""The optimizer's update of a bucket, on the rank's shard or on whole parameters. Begin with
`update`. May import bucket.
"""
