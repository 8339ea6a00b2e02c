"""Start ranks, end them, and say which failed first."""

from keras_dist.launch.function import run

__all__ = ["run"]
