"""What travels for a bucket: the numbers as they are, or half of their bits. Begin with `codec`,
the interface. May import bucket, device and update. A new compressor goes here.
"""
