"""Where plan, communication and torch meet."""
