"""Which tests run where: those in `ranks/` only under the launcher."""

import os

# Ranks share two cores in tests, and TensorFlow's start-up lines hide the results.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

collect_ignore = [] if "HOROVOD_SIZE" in os.environ else ["ranks"]
