"""Save checkpoints during a fit, and resume a training that was ended.

From the file on the disk up to the callback that saves:

- `files`: a folder of checkpoint files, to which one training at a time writes, each
  with a checksum and replaced atomically; Python values as trees of JSON and arrays
- `states`: the state of the model on all ranks, of callbacks and of random generators
- `saved`: the content of a checkpoint; the newest one as the start of a fit, also on
  another number of ranks
- `saver`: `saving`, the block around a fit, and its callback, which saves when a clock
  or SIGTERM asks for it, in a thread, and restores before the first step
"""

from keras_dist.checkpoint.saved import open_checkpoints
from keras_dist.checkpoint.saver import EXIT_CODE, saving
