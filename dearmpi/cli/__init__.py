"""The command line; the only part that prints. Begin with `commands`, which lists them."""
