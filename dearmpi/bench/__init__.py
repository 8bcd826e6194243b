"""Measures methods of data-parallel training side by side, on the same work in the same job."""
