"""Mistakes of the caller, as one clear line each."""

from __future__ import annotations


class ShopGymError(ValueError):
    """What a caller did wrong, where, and what to do; command lines print it and exit with code 2."""


class CatalogError(ShopGymError):
    """A catalogue, goal or noun file is missing or does not have the original's format."""
