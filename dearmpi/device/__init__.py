"""Devices: memory and streams of a device, where the progress thread computes, and how a device's
tensors get to MPI. Begin with `comm_stream`. Below the engine: benchmarks and checks use it
without one.
"""
