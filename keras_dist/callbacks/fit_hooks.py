"""`FitHooks`: what runs around Keras's loop, in order. `FitCallback`s switch it on."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist import comm, mixin, private
from keras_dist.data import draws
from keras_dist.launch.monitor.record import Record, here
from keras_dist.optimizer.rate import effective_rates
from keras_dist.optimizer.step_context import Request
from keras_dist.training.install import open_fit
from keras_dist.training.session import session_of
from keras_dist.training.step import DistributedStep

Logs = dict[str, Any]

# An attribute of a `keras.Model.fit` that opens a fit.
OPENS_FIT = "_keras_dist_opens_fit"


class FitHooks:
    """The steps of a fit around Keras's loop. Each method lists its steps in order.

    A `yield` stands for the user's callbacks. Steps that change state or logs, which
    these read, come before; those that react to what they did come after. So the first
    callback of this package in Keras's list begins each method, and the last one ends
    it: `dist_fit` has a `FitEdge` at both ends.

    Reports of ranks that wait name epoch and step, since each method writes them to
    this rank's record.

    Args:
        model: The model, in a fit.
        end_loop: What ends the fit, in a loop of the user's own.

    Attributes:
        statistics, broadcast, throughput, warmup: The callback that does the step, if
            it is switched on.
        checks, targets: Each `ReplicaCheck` and `StopAtAccuracy`.
        saver: What restores and saves checkpoints, if anything does.
        stops_together: Whether a stop that one rank requests stops all.
        logs_rates: Whether the rate of the epoch's last update is logged as
            `effective_learning_rate`, for a `TensorBoard` or a tracker of this rank.
            The `learning_rate` that these write is the rate for one process, because
            the factor is applied only inside the update. With several optimizers in a
            `MultiOptimizer`, the name of each one is appended, as in Keras.
    """

    def __init__(self, model: Any, end_loop: Callable[[], None]) -> None:
        self.model, self._end_loop = model, end_loop
        self.first: Any = None
        self.last: Any = None
        self.statistics: Any = None
        self.broadcast: Any = None
        self.throughput: Any = None
        self.warmup: Any = None
        self.saver: Any = None
        self.checks: list[Any] = []
        self.targets: list[Any] = []
        self.stops_together = self.logs_rates = False
        # One rank waits for nobody, and Keras may call its callbacks in a thread.
        self._record = here if comm.size() > 1 else Record()
        self._running: dict[str, Iterator[None]] = {}
        self._has_begun = False

    def start(self) -> None:
        """Before the first step, when all variables exist and none has changed."""
        if self.saver:
            self.saver.restore_shared()  # on the first rank, whose state is copied
        if self.broadcast:
            self.broadcast.copy_to_all()
        if self.statistics:
            self.statistics.remember()
        if self.saver:
            self.saver.restore_own()

    def train_begin(self, logs: Logs | None = None) -> Iterator[None]:
        """Begin a training: one exchange after the user's callbacks."""
        self._has_begun = True
        self._record.enter("begin", epoch=0)
        for each in [*self.targets, *self.checks]:
            each.begin()
        if self.warmup:
            self.warmup.set_rates()
        yield
        epoch = getattr(self.model, private.INITIAL_EPOCH, None)
        facts = {"ReplicaCheck": "; ".join(c.describe() for c in self.checks)}
        by_rank = comm.gather((facts, epoch, self.logs_rates))
        facts_by_rank, epochs, are_read = zip(*by_rank, strict=True)
        comm.check_equal(facts_by_rank, advice="Pass the same one on every rank.")
        self.logs_rates = any(are_read)
        if self.broadcast and epochs[0] is not None:
            # If the first rank has restored a backup, all ranks start at its epoch.
            setattr(self.model, private.INITIAL_EPOCH, epochs[0])

    def epoch_begin(self, epoch: int, logs: Logs | None = None) -> Iterator[None]:
        """Begin an epoch: its data is read after this."""
        self._record.enter("begin", epoch=epoch)
        session_of(self.model).begin_epoch(epoch)
        for each in [*self.targets, *self.checks]:
            each.begin_epoch(epoch)
        if self.throughput:
            self.throughput.begin_epoch()
        yield

    def train_batch_begin(self, batch: int, logs: Logs | None = None) -> Iterator[None]:
        """Begin a step."""
        self._record.enter("step", step=batch)
        if self.statistics:
            self.statistics.has_changed = True
        yield

    def test_begin(self, logs: Logs | None = None) -> Iterator[None]:
        """Begin an evaluation: all ranks evaluate one model."""
        self._record.enter("test")
        if self.throughput:
            self.throughput.read()
        for target in self.targets:
            target.has_evaluated = True
        if self.statistics:
            self.statistics.synchronize()
        yield

    def test_batch_begin(self, batch: int, logs: Logs | None = None) -> Iterator[None]:
        """Begin a step of an evaluation."""
        self._record.enter("test", step=batch)
        yield

    def test_end(self, logs: Logs | None = None) -> Iterator[None]:
        """End an evaluation, in which a layer may change its state, too."""
        self._record.enter("end")
        if self.statistics:
            self.statistics.has_changed = True
        yield
        self._end_without_fit()

    def predict_end(self, logs: Logs | None = None) -> Iterator[None]:
        """End Keras's own `predict`."""
        yield
        self._end_without_fit()

    def _end_without_fit(self) -> None:
        if not self._has_begun:
            self._end_loop()

    def predict_begin(self) -> None:
        """Before all ranks predict, outside of Keras's loop."""
        if self.statistics and session_of(self.model).has_started:
            self.statistics.synchronize()
            self.statistics.has_changed = True  # a layer may count what it predicts

    def epoch_end(self, epoch: int, logs: Logs | None = None) -> Iterator[None]:
        """End an epoch: one exchange before the user's callbacks, and one after."""
        self._record.enter("end")
        logs = {} if logs is None else logs
        steps = [s for s in (self.throughput, *self.checks, self.statistics) if s]
        by_rank = zip(*comm.gather([each.read() for each in steps]), strict=True)
        for step, found in zip(steps, by_rank, strict=True):
            step.end_epoch(found, logs)
        if self.logs_rates:
            logs.update(effective_rates(self.model))
        yield
        requests = session_of(self.model).traced.requests
        own = requests.asked == Request.STOP, [t.read(logs) for t in self.targets]
        are_stops, values = zip(*comm.gather(own), strict=True)
        for target, found in zip(self.targets, zip(*values, strict=True), strict=True):
            target.end_epoch(epoch, found, logs)
        if self.stops_together:
            requests.agree(any(are_stops) or requests.asked == Request.STOP)

    def train_end(self, logs: Logs | None = None) -> Iterator[None]:
        """End a training."""
        self._record.enter("")
        if self.statistics:
            self.statistics.end()
        yield
        for target in self.targets:
            target.end(logs)
        if self.broadcast:
            self.broadcast.end()
        self._end_loop()

    def use(self, **steps: Any) -> None:
        """Switch on steps, by the names of the attributes."""
        vars(self).update(steps)

    def add(self, callback: "FitCallback") -> bool:
        """Add the next callback of Keras's list; False for one of an evaluation."""
        if not self._has_begun:
            self.first, self.last = self.first or callback, callback
        return not self._has_begun

    def call(
        self, callback: "FitCallback", name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Run the part of a method that is due where Keras calls a callback."""
        if callback is self.first:
            self._running[name] = getattr(self, name)(*args, **kwargs)
            next(self._running[name])
        if callback is self.last:
            for _ in self._running.pop(name):
                pass


class FitCallback(keras.callbacks.Callback):
    """Switches on a step of `FitHooks`, in a fit of its model on all ranks.

    In a loop of the user's own, with a `CallbackList`, the last one ends the fit.
    """

    def __init__(self) -> None:
        super().__init__()
        if not draws.is_in_fit.get():  # it is the user's
            _replace_fit(self)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        stack = contextlib.ExitStack()
        if not mixin.has(model, DistributedStep):
            stack.enter_context(open_fit(model))
        session = session_of(model)
        if session.hooks is None:
            session.hooks = FitHooks(model, stack.close)
        if session.hooks.add(self):
            self.switch_on(session.hooks)

    def switch_on(self, hooks: FitHooks) -> None:
        """Switch on what this callback is for."""


def _forward(name: str) -> Callable[..., None]:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        session_of(self.model).hooks.call(self, name, *args, **kwargs)

    return call


# There is none at the end of a batch: on one rank, Keras would wait for each.
_BEGIN = ("train", "epoch", "train_batch", "test", "test_batch")
_END = ("train", "epoch", "test", "predict")
for _name in [*(f"{kind}_begin" for kind in _BEGIN), *(f"{kind}_end" for kind in _END)]:
    setattr(FitCallback, f"on_{_name}", _forward(_name))


class FitEdge(FitCallback):
    """Stands before and behind all others in the list of a fit that is open.

    Args:
        logs_rates: See `FitHooks`.
    """

    def __init__(self, logs_rates: bool = False) -> None:
        super().__init__()
        self._logs_rates = logs_rates

    def switch_on(self, hooks: FitHooks) -> None:
        if self._logs_rates:
            hooks.use(logs_rates=True)


class TestReports(keras.callbacks.Callback):
    """Lets reports of ranks that wait name an evaluation outside of a fit's loop."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        here.enter("test")

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        here.enter("test", step=batch)

    def on_test_end(self, logs: Logs | None = None) -> None:
        here.enter("end")


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """List what the user passed to Keras as `callbacks`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return list(keras.tree.flatten(callbacks or []))


# The user's callbacks for which `keras.Model.fit` is replaced.
_alive: "weakref.WeakSet[FitCallback]" = weakref.WeakSet()
_undo: list[tuple[Any, Callable[[], None]]] = []


def _replace_fit(callback: FitCallback) -> None:
    """As long as a callback lives, `model.fit` with one in its list opens a fit.

    Keras calls no callback when it raises, so none of them could end the fit.
    """
    plain: Any = keras.Model.fit
    _alive.add(callback)
    weakref.finalize(callback, _restore_fit)
    if getattr(plain, OPENS_FIT, False):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        named = signature.bind_partial(model, *args, **kwargs).arguments
        callbacks = flatten_callbacks(named.get("callbacks"))
        is_ours = any(isinstance(each, FitCallback) for each in callbacks)
        is_open = any(isinstance(each, FitEdge) for each in callbacks)
        with open_fit(model) if is_ours and not is_open else contextlib.nullcontext():
            return plain(model, *args, **kwargs)

    setattr(fit, OPENS_FIT, True)
    _undo.append((fit, mixin.set_method(keras.Model, "fit", fit)))


def _restore_fit() -> None:
    """Restore `model.fit` when the last callback is gone, if nobody has wrapped it."""
    is_used = any(True for _ in _alive)
    if not is_used and _undo and keras.Model.fit is _undo[-1][0]:
        _undo.pop()[1]()
