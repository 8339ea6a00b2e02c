"""Fixtures of this folder."""

from forked import forks, run_ranks

__all__ = ["forks", "run_ranks"]
