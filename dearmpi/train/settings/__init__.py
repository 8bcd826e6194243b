"""The settings of a run: which there are, where they come from, and which wins. Begin with
`choices`. Imports no other room.
"""
