"""Mistakes of the caller, as one clear line each."""

from __future__ import annotations


class ShopGymError(ValueError):
    """What a caller did wrong, where, and what to do; command lines print it and exit with code 2."""


def no_permission(error: PermissionError) -> str:
    """The line for a place that the user may not enter, read or write, wherever that came to light."""
    return f"{error.filename}: permission denied; change its permissions or name another place"


class CatalogError(ShopGymError):
    """A catalogue, goal or noun file is missing or does not have the original's format."""
