"""Who completes operations: the progress thread and the background thread, lanes in posting
order, and channels. Begin with `progress`. May import api, messages and watchdog.
"""
