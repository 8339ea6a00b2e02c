"""The train step on many ranks: weigh by rows, keep collectives out of XLA."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, metrics, mixin
from keras_dist.optimizer import (
    averages_by_rows,
    sent_with_gradients,
    timed_by,
    watched_by,
    weighted_by,
)
from keras_dist.training import atomic_save, batch_norm, build, losses
from keras_dist.training.session import Session, raising_on_all
from keras_dist.training.xla_step import XlaStep


def install(model: Any) -> Session:
    """Let `model` train with the other ranks; a second time gives the same session.

    The train function is made anew: one that was traced before averages nothing. What
    was traced to evaluate is kept as long as the model is not compiled anew.
    """
    if not mixin.has(model, DistributedStep):
        last = model.__dict__.get("_distributed_session")
        is_same = last is not None and _is_same(last.compiled, _compiled(model))
        # These numbers stay out of the model's tracked state, or they would be saved
        # with it.
        with tf.init_scope():
            rows, position, seen = (
                tf.Variable(value, dtype=tf.int64, trainable=False)
                for value in (0, 0, [0, 0, 0])
            )
            with tf.device("CPU:0"):  # read after each batch
                stop_request, agreed = (
                    tf.Variable(0.0, trainable=False) for _ in range(2)
                )
        session = Session(
            rows=rows,
            position=position,
            seen=last.seen if is_same else seen,
            stop_request=stop_request,
            agreed=agreed,
            compiled=_compiled(model),
            plain_test_function=model.test_function,
        )
        object.__setattr__(model, "_distributed_session", session)
        mixin.add(model, DistributedStep)
        model.train_function = None
        model.test_function = last.test_function if is_same else None
    return session_of(model)


def uninstall(model: Any, *, is_end: bool = False) -> None:
    """Make `model` a plain Keras model again, unless a fit of `dist_fit` goes on.

    Args:
        model: On which `install` was called.
        is_end: Whether that fit is over too.
    """
    if mixin.has(model, DistributedStep) and (is_end or not session_of(model).is_held):
        stopped = model.stop_training
        mixin.remove(model, DistributedStep)
        batch_norm.desynchronize(model)
        model.stop_training = stopped
        model.train_function = None
        session = session_of(model)
        session.test_function = model.test_function
        is_same = _is_same(session.compiled, _compiled(model))
        model.test_function = session.plain_test_function if is_same else None


def _compiled(model: Any) -> tuple[Any, ...]:
    """Objects of which `compile` makes new ones, and what else makes Keras trace."""
    made = [getattr(model, n, None) for n in ("_compile_loss", "_compile_metrics")]
    return *made, model.run_eagerly, model.jit_compile, model.steps_per_execution


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    is_known = any(found is not None for found in now[:2])
    pairs = zip(before, now, strict=True)
    return is_known and all(old is new or old == new for old, new in pairs)


def session_of(model: Any) -> Session:
    """The session of a model on which `install` was called."""
    return model._distributed_session


class DistributedStep(atomic_save.SavesWhole):
    """Mixin for a model: what Keras's own loop calls, on many ranks."""

    _distributed_session: Session

    def train_step(self: Any, data: Any) -> Any:
        session = self._distributed_session
        if not session.has_started:
            _start(self, data)
        rows = _num_rows(data)
        session.rows.assign_add(tf.cast(rows, tf.int64))
        if session.stopwatch is not None:
            data = session.stopwatch.begin_step(data)
        if _is_plain(session):
            with _inside_step(session):
                return super().train_step(data)  # type: ignore[misc]
        data = _after_updates(self, data)
        _count(session, rows)
        of_all = None
        if session.rows_of_all is not None:
            of_all = session.rows_of_all(session.position.read_value())
            session.position.assign_add(1)
        own_step = super().train_step  # type: ignore[misc]
        by_rows = comm.size() > 1 and averages_by_rows(self)
        exact = losses.of_all_rows() if by_rows else contextlib.nullcontext()
        stop_request = sent_with_gradients(session.stop_request, session.agreed)
        timed = timed_by(session.stopwatch)
        watched = watched_by(session.guard, self, data)
        is_keras_path = not session.is_jitted and losses.is_keras_path_to_update(
            self, DistributedStep
        )
        weighted = weighted_by(rows, of_all, has_own_loss=is_keras_path)
        with _inside_step(session), weighted, exact, stop_request, timed, watched:
            if session.is_jitted:
                xla_step = XlaStep(own_step)
                reason = xla_step.why_not(data)
                if reason is None:
                    return xla_step.run(data)
                session.is_jitted = False
                if comm.rank() == 0:
                    warnings.warn(f"Training without XLA: {reason}.", stacklevel=2)
            return own_step(data)

    def test_step(self: Any, data: Any) -> Any:
        session = self._distributed_session
        if comm.size() > 1:
            _count(session, _num_rows(data))
        with _inside_step(session):
            return super().test_step(data)  # type: ignore[misc]

    def make_train_function(self: Any, force: bool = False) -> Any:
        session = self._distributed_session
        asked = self.jit_compile
        session.is_jitted = bool(asked) and not _is_plain(session)
        # XLA cannot compile a collective: `train_step` compiles what is around it.
        self.jit_compile = asked and not session.is_jitted
        try:
            return super().make_train_function(force)  # type: ignore[misc]
        finally:
            self.jit_compile = asked

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._distributed_session
        before = session.is_evaluating, session.is_shared, session.has_result
        # Keras's own loop says so. An evaluation that a callback makes is its own
        # affair: perhaps it runs on one rank only.
        is_loop = kwargs.get("_use_cached_eval_dataset", False)
        session.is_evaluating, session.has_result = True, False
        session.is_opening = False
        session.is_shared = is_loop or (session.is_shared and not before[0])
        try:
            with raising_on_all(session, lambda: _waits_for_result(session)):
                return super().evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            session.is_evaluating, session.is_shared, session.has_result = before

    def reset_metrics(self: Any) -> None:
        self._distributed_session.seen.assign([0, 0, 0])
        self._distributed_session.is_opening = False
        super().reset_metrics()  # type: ignore[misc]

    def get_metrics_result(self: Any) -> Any:
        return _results(self, super().get_metrics_result)  # type: ignore[misc]

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        # What Keras's loops log: the results, or what the last step has returned.
        if comm.size() == 1 or not _is_of_all(self._distributed_session):
            return super()._get_metrics_result_or_logs(logs)  # type: ignore[misc]
        return _results(self, super().get_metrics_result, logs)  # type: ignore[misc]

    @property
    def stop_training(self: Any) -> bool:
        session = self._distributed_session
        if session.agrees_on_stop and _is_stop_agreed(session):
            return True
        return self.__dict__.get("stop_training", False)

    @stop_training.setter
    def stop_training(self: Any, value: bool) -> None:
        # A wish of this rank alone, which all hear of after the next batch, or from
        # `StopTogether` at the end of the epoch.
        session = self._distributed_session
        session.requests_stop = bool(value)
        with tf.init_scope():
            session.stop_request.assign(float(session.requests_stop))
        if not (value and session.agrees_on_stop):
            self.__dict__["stop_training"] = bool(value)


def confirm_stop(model: Any, *, is_agreed: bool) -> None:
    """Let Keras's loop see that training stops; the same on all ranks."""
    model.__dict__["stop_training"] = is_agreed
    session_of(model).agreed.assign(0.0)


@contextlib.contextmanager
def alone(model: Any) -> Iterator[None]:
    """Inside the block this rank evaluates by itself: the others do not take part."""
    session = session_of(model)
    before, session.averages_metrics = session.averages_metrics, False
    try:
        yield
    finally:
        session.averages_metrics = before


def _start(model: Any, data: Any) -> None:
    """Build and copy what the first step needs."""
    session = session_of(model)
    session.has_started = True
    # Outside of the graph that is being traced, so that it happens once, now.
    with tf.init_scope(), _inside_step(session):
        is_first = session.builds_first or not _is_plain(session)
        if is_first or build.has_unbuilt_parts(model):
            comm.run_on_all(lambda: build.build(model, data))
        batch_norm.synchronize(model)
        for hook in session.before_first_step:
            hook()


def _is_plain(session: Session) -> bool:
    """Whether the model's own step is all that there is to a step."""
    return comm.size() == 1 and session.guard is None


def _is_stop_agreed(session: Session) -> bool:
    return tf.executing_eagerly() and float(session.agreed.numpy()) > 0


def _is_of_all(session: Session) -> bool:
    """Whether a result that is read now is one over all ranks."""
    if session.in_step or not session.averages_metrics:
        return False
    return session.is_shared or not session.is_evaluating


def _waits_for_result(session: Session) -> bool:
    return _is_of_all(session) and not session.has_result


def _count(session: Session, rows: Any) -> None:
    rows = tf.cast(rows, tf.int64)
    steps, so_far, _ = tf.unstack(session.seen.read_value())
    session.seen.assign(tf.stack([steps + 1, so_far + rows, rows]))


def _results(model: Any, own_result: Callable[[], Any], logs: Any = None) -> Any:
    session = session_of(model)
    if not _is_of_all(session):
        return own_result()
    session.has_result = True
    session.is_opening = not session.is_evaluating
    steps, rows, last_rows = session.seen.numpy().tolist()
    has_rows = session.has_validation_rows or not session.is_evaluating
    seen = metrics.Seen(rows, steps, last_rows, has_rows)
    return metrics.global_result(model.metrics, own_result, seen=seen, logs=logs)


@contextlib.contextmanager
def _inside_step(session: Session) -> Iterator[None]:
    before, session.in_step = session.in_step, True
    try:
        yield
    finally:
        session.in_step = before


def _after_updates(model: Any, data: Any) -> Any:
    """The same data, there when the updates of the step before have been made.

    Several steps may stand in one graph. Collectives have the same names in each, and
    those of two steps must not be under way at once.
    """
    if tf.executing_eagerly():
        return data
    reads = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    with tf.control_dependencies(reads):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), data
        )


def _num_rows(data: Any) -> Any:
    """Rows in a batch: the length of the first axis of its first tensor."""
    for leaf in keras.tree.flatten(data):
        if leaf is not None and len(leaf.shape):
            return tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0]
    return 1
