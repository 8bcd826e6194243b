"""What travels for a bucket: the numbers as they are, or half of their bits. Begin with
`wire_range`. May import bucket and update. A new compressor goes here.
"""
