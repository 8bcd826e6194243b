"""Measures methods of data-parallel training side by side, on the same work in the same job. Begin
with `benchmark`; `method` is what a method has to offer, `method_names` lists them.
"""
