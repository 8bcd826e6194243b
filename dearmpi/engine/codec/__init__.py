"""What travels for a bucket: the numbers as they are, half of their bits, quantized, a few of them,
or factors. Begin with `codec`, the interface; `choice` lists them all. May import bucket, trace and
update. A new compressor goes here.
"""
