"""The train step on many ranks, in stages.

1. *Rows that count*: how many rows this rank has, and all ranks have, in this step
2. *Building and first copy*: once, before the first step (`build.start`)
3. *Losses*: each becomes this rank's part of that of the global batch
4. *Gradients*: by the model's own step; XLA may compile it (`recorded_step`)
5. *Exchange*: in `apply` of the outermost optimizer (`optimizer.reduce`)
6. *Update*: by Keras, at the scaled rate (`optimizer.rate`)
7. *Statistics*: metrics and counters do not count a batch that is a copy
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.data.dealer import add_mark, is_mark
from keras_dist.lines import say, warn
from keras_dist.optimizer import (
    averages,
    check_again,
    effective_rates,
    explain_updates,
    only_attached,
    step_context,
)
from keras_dist.training import (
    build,
    losses,
    metrics,
    trial,
)
from keras_dist.training.autotune import WithoutAutotune
from keras_dist.training.first_batch import start_on_first_batch
from keras_dist.training.losses import num_rows
from keras_dist.training.recorded_step import RecordedStep
from keras_dist.training.remember import preserve_variables
from keras_dist.training.saving import SavesWhole
from keras_dist.training.session import (
    Session,
    session_of,
)


def build_now(model: Any, data: Any) -> None:
    """Build `model`, its metrics and its optimizers without a step.

    Args:
        model: A model on which `install` was called.
        data: Its first batch.
    """
    own_step = own_train_step(model)
    build.build(model, build.OwnStep(own_step, data, is_eager=model.run_eagerly))


class DistributedStep(SavesWhole, WithoutAutotune):
    """Mixin for a model: the methods that Keras's loops call, on many ranks."""

    _distributed_session: Session

    def train_step(self: Any, data: Any) -> Any:
        session = self._distributed_session
        own_step = _of_a_copy(super().train_step)  # type: ignore[misc]
        # Rows that count
        data, has_rows = session.split_mark(data)
        session.has_run = True
        # Building and first copy, if the first batch was not read before
        if not session.has_started:
            build.start(self, session, data, own_step, is_eager=tf.executing_eagerly())
        length = rows = num_rows(data)
        if has_rows is not None:
            rows = tf.where(has_rows, length, 0)
        session.train_rows(rows)
        if comm.size() == 1:
            entered = step_context.entered(step_context.StepContext())
            with entered, _not_before(session, data):
                return own_step(data)
        data = _after_updates(self, data)
        session.see_rows(rows)
        with _after(data):
            number = session.traced.next_step()
        context = _context(self, rows, length, has_rows, number)
        with contextlib.ExitStack() as stack:
            stack.enter_context(step_context.entered(context))
            # Losses
            if averages(self):
                own_step = _of_all_rows(self, own_step)
            stack.enter_context(only_attached())
            stack.enter_context(session.traced.noise.drawing())
            stack.enter_context(_not_before(session, data))
            # Statistics
            stack.enter_context(_without_counting(self, has_rows))
            # Gradients; exchange and update, when the step calls `apply`
            return _run(self, own_step, data)

    def test_step(self: Any, data: Any) -> Any:
        if comm.size() > 1:
            self._distributed_session.see_rows(num_rows(data))
        with step_context.entered(step_context.StepContext()):
            return super().test_step(data)  # type: ignore[misc]

    def preprocess_samples(
        self: Any, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Any:
        # KerasHub's `fit` maps this over the batches, marks and all.
        own = super().preprocess_samples  # type: ignore[misc]
        if self._distributed_session.is_marked and is_mark(y):
            return add_mark(own(*keras.utils.unpack_x_y_sample_weight(x)), y)
        return own(x, y, sample_weight)

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return
        session = self._distributed_session
        session.is_traced = False
        check_again(self)
        asked = self.jit_compile
        is_split = bool(asked) and comm.size() > 1
        session.traced.split(is_split)
        # XLA cannot compile a collective: `train_step` compiles what is around it.
        self.jit_compile = asked and not is_split
        try:
            super().make_train_function(force)  # type: ignore[misc]
        finally:
            self.jit_compile = asked
        function = self.train_function

        def train(iterator: Any) -> Any:
            with explain_updates():
                return function(iterator)

        self.train_function = start_on_first_batch(
            train,
            steps=self.steps_per_execution,
            needs_batch=lambda: _needs_batch(self),
            start=lambda data: _start(self, data),
        )

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super().compute_loss  # type: ignore[misc]
        if losses.is_keras_method(self, "compute_loss", DistributedStep):
            return plain(*args, **kwargs)
        return losses.compute_part(plain, args, kwargs)

    def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
        loss = super()._aggregate_additional_loss(loss)  # type: ignore[misc]
        return losses.weigh("loss", loss)

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)  # type: ignore[misc]
        self._distributed_session.traced.forget_trial()
        for prepare in self._distributed_session.on_compile:
            prepare()

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with evaluating(self, is_of_loop=kwargs.get(private.OF_FIT, False)):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def reset_metrics(self: Any) -> None:
        self._distributed_session.reset_rows_seen()
        self._distributed_session.end_opening()
        super().reset_metrics()  # type: ignore[misc]

    def get_metrics_result(self: Any) -> Any:
        return _results(self, super().get_metrics_result)  # type: ignore[misc]

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        # Keras's loops log this: the results, or values that the last step returned.
        session = self._distributed_session
        if session.rates is not None and session.evaluation is None:
            session.rates = effective_rates(self)
        if comm.size() == 1 or not session.is_of_all():
            return super()._get_metrics_result_or_logs(logs)  # type: ignore[misc]
        results = _results(self, super().get_metrics_result, logs)  # type: ignore[misc]
        session.end_steps()
        return results

    @property
    def stop_training(self: Any) -> bool:
        stop_request = self._distributed_session.traced.stop_request
        if stop_request.is_collective and stop_request.is_agreed():
            return True
        return self.__dict__.get("stop_training", False)

    @stop_training.setter
    def stop_training(self: Any, value: bool) -> None:
        # A request of one rank: all ranks agree on it after the next batch, or in
        # `StopTogether` at the end of the epoch.
        stop_request = self._distributed_session.traced.stop_request
        stop_request.ask(bool(value))
        if not (value and stop_request.is_collective):
            self.__dict__["stop_training"] = bool(value)


def evaluating(
    model: Any, *, is_of_loop: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Context manager for an evaluation by Keras's own loop.

    Args:
        model: A model on which `install` was called.
        is_of_loop: Whether the loop of `Model.fit` calls it.
    """
    session = session_of(model)
    evaluation = session.validation if is_of_loop else session.next_evaluation
    return session.evaluating(evaluation)


def _needs_batch(model: Any) -> bool:
    """Return True before the first step, unless the last fit traced it."""
    session = session_of(model)
    if session.is_traced and not session.has_started:
        build.start_traced(model, session)
    return not session.has_started or session.traced.is_changed


def _start(model: Any, data: Any) -> None:
    """Build the model, copy it to all ranks and try its step, before it is traced.

    Args:
        model: The model.
        data: The first batch, as numbers.
    """
    session = session_of(model)
    own_step = own_train_step(model)
    data, _ = session.split_mark(data)
    if not session.has_started:
        build.start(model, session, data, own_step, is_eager=model.run_eagerly)
    result = session.traced.trial or trial.Trial()
    is_averaged = comm.size() > 1 and averages(model)
    is_tried = session.traced.trial is not None
    if is_averaged and not (is_tried or losses.is_declared(model, DistributedStep)):
        step = losses.split_step(model, own_step, DistributedStep)
        result = trial.try_step(model, step, data)
        trial.warn(result)
        if session.is_verbose and comm.rank() == 0:
            say(f"gradients: {result}")
    session.traced.use_trial(result, global_rows=int(comm.sum(int(num_rows(data)))))


def own_train_step(model: Any) -> Callable[[Any], Any]:
    """Return the model's own step, on a model on which `install` was called."""
    return _of_a_copy(super(DistributedStep, model).train_step)  # type: ignore[misc]


def _of_a_copy(own_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a step change the lists and dicts of its batch; a `tf.function` may not.

    Object detectors convert their boxes so.
    """

    @functools.wraps(own_step)
    def step(data: Any) -> Any:
        return own_step(keras.tree.map_structure(lambda leaf: leaf, data))

    return step


def _context(
    model: Any, rows: Any, length: Any, has_rows: Any, number: Any
) -> step_context.StepContext:
    """Return the context that this train step passes to the optimizer."""
    session = session_of(model)
    is_keras_path = all(
        losses.is_keras_method(owner, name, DistributedStep)
        for owner, name in (
            (model, "train_step"),
            (model.optimizer, "apply_gradients"),
        )
    )
    return step_context.StepContext(
        rows=rows,
        length=length if isinstance(length, int) else None,
        has_rows=has_rows,
        step=number,
        rows_of_all=session.next_rows_of_all(),
        global_rows=session.traced.global_rows,
        is_strided=session.feed is not None and session.feed.is_strided,
        is_keras_path=is_keras_path and not session.traced.is_split,
        stop_request=session.traced.stop_request,
    )


@contextlib.contextmanager
def _without_counting(model: Any, has_rows: Any) -> Iterator[None]:
    """Context manager in which a copied batch changes no metrics and counters.

    Other state does: the statistics of the copy are those of the last global batch.

    Args:
        model: The model.
        has_rows: See `StepContext`.
    """
    if has_rows is None:
        yield
        return
    counters = [
        variable
        for variable in model.non_trainable_weights
        if getattr(variable, "aggregation", None) == "sum"
    ]
    for layer in private.layers_of(model):
        if isinstance(layer, keras.Model):
            counters += layer.metrics_variables
    counters = list({id(variable): variable for variable in counters}.values())
    with preserve_variables(counters, unless=has_rows):
        yield


def _of_all_rows(model: Any, own_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the model's own step: its losses and logs are those of the global batch.

    Args:
        model: The model.
        own_step: Its own `train_step`.
    """
    result = session_of(model).traced.trial
    kinds = None if result is None else result.kinds
    return losses.split_step(model, own_step, DistributedStep, kinds)


def _run(model: Any, own_step: Callable[[Any], Any], data: Any) -> Any:
    """Run the model's own step: in parts, if XLA compiles it."""
    session = session_of(model)
    if not session.traced.is_split:
        return own_step(data)
    step = RecordedStep(own_step)
    reason = step.why_not(data)
    if reason is None:
        return step.run(data)
    session.traced.split(False)
    if comm.rank() == 0:
        warn(f"Training without XLA: {reason}.")
    return own_step(data)


def _results(model: Any, own_result: Callable[[], Any], logs: Any = None) -> Any:
    session = session_of(model)
    if not session.is_of_all():
        return own_result()
    seen = session.update_counts()
    return metrics.global_result(model.metrics, own_result, seen=seen, logs=logs)


def _after_updates(model: Any, data: Any) -> Any:
    """Make the data depend on the updates of the step before.

    One graph may contain several steps, whose collectives have the same names. So a
    step must not begin its collectives before those of the step before have ended.
    """
    if tf.executing_eagerly():
        return data
    reads = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    with tf.control_dependencies(reads):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), data
        )


def _not_before(session: Session, data: Any) -> Any:
    """Context manager in which a graph does nothing before the batch was read.

    Where Keras does not know the number of batches, it begins a step more at the end of
    the data, and sees then that there is no batch. What does not depend on the batch is
    done nevertheless, such as counting the update, or drawing a random number.
    """
    return _after(data) if session.may_read_on else contextlib.nullcontext()


def _after(data: Any) -> Any:
    """Context manager in which a graph does nothing before the batch was read."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    flat = tf.nest.flatten(data, expand_composites=True)
    leaves = [leaf for leaf in flat if leaf is not None]
    return tf.control_dependencies(leaves)
