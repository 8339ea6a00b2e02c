"""See to it that nobody waits for ever, and that the first failure is seen."""

from keras_dist.monitor.record import here
from keras_dist.monitor.usage import threads
from keras_dist.monitor.watchdog import EXIT_CODE, limit_of, set_limit, start

__all__ = ["EXIT_CODE", "here", "limit_of", "set_limit", "start", "threads"]
