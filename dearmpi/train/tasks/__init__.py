"""The tasks that come with dearmpi, and those named by the user. Begin with `registry`. May import
checkpoint and files.
"""
