"""What each Python that the tests start does first, since they start several hundred.

Importing TensorFlow makes a million objects that stay. Python looks through them some
hundred times while it imports, and once more at its end: two of the five seconds that
such a process takes. With larger thresholds, and none of them looked at in the end, a
test of ranks takes a fifth less, and no rank waits for another one's collection.
"""

import atexit
import gc

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)
