"""What a user sees of a fit, and how files are written. Needs no TensorFlow.

- `plan`: every decision about a fit, as a box
- `lines`: lines beside the plan and the progress bar
- `files`: write a file atomically
"""

from keras_dist.report.files import new_file, write_whole

__all__ = ["new_file", "write_whole"]
