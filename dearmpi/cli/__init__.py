"""The command line; the only part that prints. Begin with `main`, which lists the commands."""
