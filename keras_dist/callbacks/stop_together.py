"""All ranks stop after the same epoch, whichever asked for it."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.training import step
from keras_dist.training.session import session_of


class StopTogether(keras.callbacks.Callback):
    """Grants `model.stop_training = True` of any rank to all ranks at the same moment.

    A rank that stopped alone would leave the others waiting in the next averaging. The
    wish travels with the gradients of the next update, after which all leave the epoch;
    at the latest all hear of it at the epoch's end.

    Stands last in a list, after every callback that may want to stop.
    """

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model).stop_request.make_collective(comm.size() > 1)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if comm.size() > 1:  # a fit that an error has ended may have left a wish
            stop_request = session_of(self.model).stop_request
            stop_request.grant(self.model, is_granted=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if comm.size() == 1:
            return  # granted already
        stop_request = session_of(self.model).stop_request
        is_granted = comm.sum(int(stop_request.is_asked)) > 0
        stop_request.grant(self.model, is_granted=is_granted)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        step.uninstall(self.model)
