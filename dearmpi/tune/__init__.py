"""Measures the link and the layers, and searches for a bucket cap by trying. Begin with `calibrate`
and `layer_timer`; `search` is the paper's.
"""
