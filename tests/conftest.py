"""Tests in `ranks/` run under the launcher only."""

import os

# TensorFlow's start-up lines hide the results, and several ranks run on two cores.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

collect_ignore = [] if "HOROVOD_SIZE" in os.environ else ["ranks"]
