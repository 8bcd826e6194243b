"""Communication: collectives on flat buffers, the thread that completes them, and the ranks' world.

Knows no bucket, no model and no schedule. `lifecycle.connect` makes the `world`; begin there. The
rooms from the bottom up: api, messages, watchdog, process, progress, algorithms, backends.
"""
