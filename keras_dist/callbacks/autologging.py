"""MLflow's autologging, which puts its own callback into the list of each rank."""

import contextlib
import sys
from collections.abc import Iterator

from keras_dist import comm


@contextlib.contextmanager
def autologged_once() -> Iterator[None]:
    """Inside the block, a `fit` is autologged on the first rank only.

    `mlflow.autolog()` replaces `keras.Model.fit` by a function that begins a run, adds
    a callback and saves the model, after `dist_fit` has decided which callbacks run on
    this rank. MLflow itself turns that function off on the other ranks, here.
    """
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    if autologging is None or comm.rank() == 0:
        yield
        return
    with autologging.disable_autologging():
        yield
