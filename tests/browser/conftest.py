"""A browser for every test here."""

from browsing import browser

__all__ = ["browser"]
