"""Who completes operations: the progress thread, its lanes in posting order, and channels. Begin
with `progress`. May import api, messages and watchdog.
"""
