"""Run a script on several numbers of ranks, and show how far it scales.

`keras-dist scale` starts the user's script by `keras-dist run`, once for each number of
ranks and repeat. `dist_fit` writes the JSON of its training (`callbacks/report.py`), by
a variable of the environment (`report/study.py`). Needs no TensorFlow.

- `command`: the command and its options
- `runs`: one run: start it, show how far it is, read what it wrote
- `folder`: the folder of the runs, by which an interrupted study goes on
- `results`: from the runs to numbers by the number of ranks
- `prediction`: more ranks than were measured, by a model of a step
- `price`: what a run costs
- `limits`: what limits, in words
- `page_command`: the command `keras-dist page`
- `scale_page`, `scale_charts`: the page
"""
