"""The printed plan, and pages that show a training or several. Needs no TensorFlow.

- `plan`: every decision about a fit, as a box
- `training`: the JSON of one training, and what follows from it, as numbers and words
- `page`, `page.html`: a page from sections, charts and tables
- `training_page`: the page of one training
- `files`: write a file atomically
"""

from keras_dist.report.files import json_text, new_file, write_whole
from keras_dist.report.page import check_installed
from keras_dist.report.training import Epoch, OfRank, Training, accuracy_in
from keras_dist.report.training_page import training_page

__all__ = [
    "Epoch",
    "OfRank",
    "Training",
    "accuracy_in",
    "check_installed",
    "json_text",
    "new_file",
    "training_page",
    "write_whole",
]
