"""Stop all ranks when one rank requests it."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.fit_callback import FitCallback
from keras_dist.training.session import session_of


class StopTogether(FitCallback):
    """Stops all ranks after the same step when any rank sets `model.stop_training`.

    If one rank stopped alone, the others would wait for it in the next collective. So
    `model.stop_training = True` on one rank is a stop request. It is sent to all ranks
    with the gradients of the next update; after that step, all ranks stop. At the end
    of an epoch, this callback sends it at once.

    Position in the list: last, after every callback that may request a stop.

    Example:

    ```python
    stops = [keras.callbacks.TerminateOnNaN(), keras_dist.StopTogether()]
    model.fit(x, y, callbacks=stops)
    ```
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        session_of(model).traced.requests.is_alone = comm.size() == 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).traced.requests.agree_to_stop()
