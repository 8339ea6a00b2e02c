"""Run a script on several numbers of ranks, and show how far it scales.

`keras-dist scale` starts the user's script by `keras-dist run`, once for each number of
ranks and repeat. `dist_fit` writes the JSON of its training (`callbacks/report.py`), as
an environment variable asks (`report.training.Study`). Needs no TensorFlow.

- `command`: the commands `scale` and `page`
- `runs`: one run: start it, follow it, keep it, so that a study can be resumed
- `results`: from the runs to numbers by the number of ranks, and a prediction
- `scale_page`: the page with its charts
"""
