"""Pages that show a training, or a study of several. Needs no TensorFlow.

- `files`: write a file whole or not at all
- `training`: the content of a training's JSON, and what follows from it
- `accuracy`: which of the logs is the accuracy, and when it was reached
- `limits`: what takes the time, in words
- `charts`: specifications of charts, for Vega-Lite
- `page`: a page of HTML from sections, charts and tables
- `training_page`: the page of one training
- `javascript`: Vega-Lite itself, which a page contains
"""

from keras_dist.report.accuracy import accuracy_in
from keras_dist.report.files import json_text, new_file, write_whole
from keras_dist.report.javascript import check_installed, javascript
from keras_dist.report.training import Epoch, OfRank, Training
from keras_dist.report.training_page import training_page

__all__ = [
    "Epoch",
    "OfRank",
    "Training",
    "accuracy_in",
    "check_installed",
    "javascript",
    "json_text",
    "new_file",
    "training_page",
    "write_whole",
]
