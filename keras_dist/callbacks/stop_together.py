"""Stop all ranks when one rank requests it."""

from keras_dist import comm
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks
from keras_dist.training.session import session_of


class StopTogether(FitCallback):
    """Switches on joint stops: `model.stop_training` of any rank stops all.

    If one rank stopped alone, the others would wait for it in the next collective. So
    `model.stop_training = True` on one rank is a stop request. It is sent to all ranks
    with the gradients of the next update; after that step, all ranks stop. At the end
    of an epoch, it is sent at once.

    Position in the list: a callback of keras_dist after those that request a stop.

    Example:

    ```python
    stops = [keras.callbacks.TerminateOnNaN(), keras_dist.StopTogether()]
    model.fit(x, y, callbacks=stops)
    ```
    """

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.use(stops_together=True)
        session_of(hooks.model).traced.requests.is_alone = comm.size() == 1
