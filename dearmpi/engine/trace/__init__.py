"""What took time in an iteration: spans, their clock, and the layers' times. Begin with `spans`.
Imports no other room.
"""
