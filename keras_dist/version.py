"""The one place in which the version stands."""

__version__ = "0.1.0"
