"""Plans: immutable data built by pure functions. Needs nothing but the standard library."""
