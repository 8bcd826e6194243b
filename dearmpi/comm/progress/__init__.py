"""Who drives operations under way: the progress thread, its lanes in posting order, and channels.
Begin with `progress`. May import api, messages and watchdog.
"""
