"""The version of this package, for whatever writes a file that another one may read."""

__version__ = "0.2.0"


def describe_other_version(what: str, version: str) -> list[str]:
    """A line where ``what``, of a format that is read, was made by another version than this."""
    if version == __version__:
        return []
    return [f"{what} was made by dearmpi {version}, and this is {__version__}: times may differ"]
