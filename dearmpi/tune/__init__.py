"""Measures the link and the layers, and searches for a bucket cap by trying."""
