"""The train step on many ranks, in stages: `DistributedStep.train_step` lists them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.data.batch_rows import (
    BatchRows,
    batch_of,
    change_batch,
    num_rows,
    take_off,
)
from keras_dist.lines import say, warn
from keras_dist.optimizer import step_context
from keras_dist.optimizer.attach import averages_gradients, check_again, only_attached
from keras_dist.optimizer.reduce import explain_updates
from keras_dist.optimizer.step_context import Request
from keras_dist.training import build, losses, metrics, trial
from keras_dist.training.recorded_step import RecordedStep
from keras_dist.training.remember import preserve_variables
from keras_dist.training.session import LOCAL_EVALUATION, Session, session_of

_WHOLE_BATCHES = (
    "Train on one process (keras-dist run -np 1), or call `keras_dist.dist_fit(model, "
    '…, batch="rank")`: then a rank has whole batches of its own.'
)


class PredictsAlone:
    """Mixin for a model: ranks predict other batches, so no step communicates."""

    def predict_step(self: Any, data: Any) -> Any:
        batch, rows = take_off(data)
        with step_context.enter(step_context.StepContext()):
            outputs = super().predict_step(batch)  # type: ignore[misc]
        if batch is data:
            return outputs
        return keras.tree.map_structure(lambda leaf: leaf[: rows.rows], outputs)


class DistributedStep(PredictsAlone):
    """Mixin for a model: the methods that Keras's loops call, on many ranks."""

    _distributed_session: Session

    def train_step(self: Any, data: Any) -> Any:
        own_step = own_train_step(self)
        self._distributed_session.has_run = True
        data, rows = count_rows(self, data)
        build_once(self, data, own_step)
        if comm.size() == 1:
            entered = step_context.enter(step_context.StepContext())
            with entered, wait_for_batch(self, data):
                return own_step(data)
        data = follow_last_update(self, data)
        with (
            step_context.enter(describe_step(self, data, rows)) as context,
            step_context.run_inline(),
            only_attached(),
            session_of(self).traced.noise.draw_step_numbers(),
            wait_for_batch(self, data),
            ignore_copy(self, context.has_rows),  # in metrics and counters
        ):
            step = split_losses(self, own_step)
            # In it the step calls `apply`, which exchanges gradients and then updates
            # (`optimizer.reduce`, `optimizer.rate`).
            return compute_gradients(self, step, data)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain, requests = super().fit, session_of(self).traced.requests  # type: ignore[misc]
        requests.reset()
        # In a callback, which may read what this rank alone has requested.
        with mixin.change(requests, is_shown=False):
            return plain(*args, **kwargs)

    def test_step(self: Any, data: Any) -> Any:
        data, rows = take_off(data)
        if comm.size() > 1:
            self._distributed_session.see_rows(rows.rows)
        noise = session_of(self).traced.noise
        with step_context.enter(step_context.StepContext()), noise.draw_batch_numbers():
            return super().test_step(data)  # type: ignore[misc]

    def preprocess_samples(
        self: Any, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Any:
        # KerasHub's `fit` maps this over the batches, with what is beside them.
        own = super().preprocess_samples  # type: ignore[misc]
        if batch_of(x) is x:
            return own(x, y, sample_weight)
        return change_batch(x, lambda b: own(*keras.utils.unpack_x_y_sample_weight(b)))

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return
        session = self._distributed_session
        check_again(self)
        is_split = bool(self.jit_compile) and comm.size() > 1
        session.traced.split(is_split)
        # XLA cannot compile a collective: `train_step` compiles what is around it.
        with mixin.change(self, jit_compile=self.jit_compile and not is_split):
            super().make_train_function(force)  # type: ignore[misc]
        function = self.train_function

        def train(iterator: Any) -> Any:
            session = session_of(self)  # of this fit, whose data the next must not hold
            with session.raise_on_all(), explain_updates():
                needs_batch, session.calls = _needs_batch(self), session.calls + 1
                if needs_batch or session.may_try_again():
                    count = self.steps_per_execution
                    batches, again = build.read_first(iterator, count)
                    iterator = again()
                    if batches:
                        batch, _ = session.split_data(batches[0])
                        (_start if needs_batch else _try_step)(self, batch)
                    if self.train_function is not train:
                        return self.train_function(iterator)
                with _check_step_runs(self), _explain_parts(session):
                    logs = function(iterator)
                _say_own_draws(session)
                return logs

        self.train_function = train

    def make_test_function(self: Any, force: bool = False) -> Any:
        if comm.size() == 1 or (self.test_function is not None and not force):
            return super().make_test_function(force)  # type: ignore[misc]
        super().make_test_function(True)  # type: ignore[misc]
        many = self.test_function
        super().make_test_function(True)  # type: ignore[misc]
        one = self.test_function

        def run_one(iterator: Any) -> Any:
            with mixin.change(self, steps_per_execution=1):
                return one(iterator)

        def test(iterator: Any) -> Any:
            turn, count = session_of(self).turn, self.steps_per_execution
            if turn is None:
                return many(iterator)
            if not turn.is_known:
                batches, again = build.read_first(iterator, count)
                turn.find(lambda: many(again()), len(batches))
                self.reset_metrics()  # those that were built, and rows, too
                iterator = again()
            return turn.run(lambda: many(iterator), lambda: run_one(iterator), count)

        self.test_function = test

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super().compute_loss  # type: ignore[misc]
        if losses.is_keras_method(self, "compute_loss"):
            return plain(*args, **kwargs)
        return losses.compute_part(plain, args, kwargs)

    def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
        loss = super()._aggregate_additional_loss(loss)  # type: ignore[misc]
        return losses.weigh("loss", loss)

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        plain, session = super().compile, self._distributed_session  # type: ignore[misc]
        plain(*args, **kwargs)
        session.traced.use_trial(None)
        session.traced.starts.clear()
        build.prepare_optimizers(self)

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        session, is_validation = session_of(self), kwargs.get(private.CALLED_BY_FIT)
        feed = session.decided.validation if is_validation else LOCAL_EVALUATION
        with session.evaluate(self, feed):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def reset_metrics(self: Any) -> None:
        session = self._distributed_session
        session.traced.rows_seen.assign([0, 0, 0])
        with session.traced.record_reset(self):
            super().reset_metrics()  # type: ignore[misc]

    def get_metrics_result(self: Any) -> Any:
        return _results(self, super().get_metrics_result)  # type: ignore[misc]

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        # Keras's loops log this: the results, or values that the last step returned.
        session = self._distributed_session
        if comm.size() == 1 or not session.runs_on_all():
            return super()._get_metrics_result_or_logs(logs)  # type: ignore[misc]
        return _results(self, super().get_metrics_result, logs)  # type: ignore[misc]

    @property
    def stop_training(self: Any) -> bool:
        return self._distributed_session.traced.requests.is_stop()

    @stop_training.setter
    def stop_training(self: Any, value: bool) -> None:
        # All ranks agree on it after the next update, or at the end of the epoch.
        request = Request.STOP if value else Request.NOTHING
        self._distributed_session.traced.requests.ask(request)


def batch_logs(model: Any, logs: Any) -> Any:
    """Return the logs of a batch over all ranks, after its step; a collective."""
    plain = super(DistributedStep, model).get_metrics_result
    return _results(model, plain, logs, is_over=False)


def count_rows(model: Any, data: Any) -> tuple[Any, BatchRows]:
    """Count the rows of this step; return the batch and its rows."""
    session = session_of(model)
    data, rows = session.split_data(data)
    session.traced.rows_trained.assign_add(tf.cast(rows.rows, tf.int64))
    if comm.size() > 1:
        session.see_rows(rows.rows)
    return data, rows


def build_once(model: Any, data: Any, own_step: Callable[[Any], Any]) -> None:
    """Build and copy the model, if the first batch was not read before (`_start`)."""
    session = session_of(model)
    if not session.has_started:
        is_eager = tf.executing_eagerly()
        build.start(model, data, own_step, is_eager=is_eager)


def follow_last_update(model: Any, data: Any) -> Any:
    """Make the batch depend on the updates of the step before.

    One graph may contain several steps, whose collectives have the same names. So a
    step must not begin its collectives before the step before has ended its own.
    """
    if tf.executing_eagerly():
        return data
    reads = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    with tf.control_dependencies(reads):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), data
        )


def describe_step(model: Any, data: Any, rows: BatchRows) -> step_context.StepContext:
    """Count the step, and return what it passes to the optimizer."""
    session = session_of(model)
    is_keras_path = losses.is_keras_method(model, "train_step")
    with _after(data):
        number = session.traced.steps.assign_add(1, read_value=True)
    return step_context.StepContext(
        rows=rows.rows,
        length=num_rows(data),
        begin=rows.begin,
        step=number,
        rows_of_all=rows.total,
        global_rows=session.traced.global_rows,
        shares_batch=session.decided.feed.plan.is_global,
        is_keras_path=is_keras_path and not session.traced.is_split,
        requests=session.traced.requests,
        draw_common_numbers=session.traced.noise.draw_common_numbers,
    )


def wait_for_batch(model: Any, data: Any) -> Any:
    """Context manager in which a graph does nothing before the batch was read.

    Where Keras does not know the number of batches, it begins a step more at the end of
    the data, and sees then that there is no batch. What does not depend on the batch is
    done nevertheless, such as counting the update, or drawing a random number.
    """
    may_read_on = session_of(model).may_read_on
    return _after(data) if may_read_on else contextlib.nullcontext()


@contextlib.contextmanager
def ignore_copy(model: Any, has_rows: Any) -> Iterator[None]:
    """Context manager in which a copied batch changes no metrics and counters.

    Other state does: the copy has the statistics of the last global batch.
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
    with preserve_variables(counters, unless=has_rows):
        yield


def split_losses(model: Any, own_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the step with its losses and logs as parts of the global batch's."""
    if not averages_gradients(model):
        return own_step
    found = session_of(model).traced.trial or trial.Trial()
    return losses.split_step(model, own_step, found.kinds)


def compute_gradients(model: Any, step: Callable[[Any], Any], data: Any) -> Any:
    """Run the step: in parts, if XLA compiles it; return its logs."""
    session = session_of(model)
    if not session.traced.is_split:
        return step(data)
    recorded = RecordedStep(step)
    reason = recorded.why_not(data)
    if reason is None:
        return recorded.run(data)
    session.traced.split(False)
    if comm.rank() == 0:
        warn(f"Training without XLA: {reason}.")
    return step(data)


def own_train_step(model: Any) -> Callable[[Any], Any]:
    """Return the model's own step, on a model on which `install` was called.

    It may change the lists and dicts of its batch, as object detectors do that convert
    their boxes; a `tf.function` may not.
    """
    own_step = super(DistributedStep, model).train_step

    @functools.wraps(own_step)
    def step(data: Any) -> Any:
        return own_step(keras.tree.map_structure(lambda leaf: leaf, data))

    return step


def _needs_batch(model: Any) -> bool:
    """Return True before the first step after `compile`, unless it is traced."""
    session = session_of(model)
    if session.traced.is_reused(model) and not session.has_started:
        session.has_run = True
        build.start(model)
    return not session.has_started or session.traced.global_rows is None


@contextlib.contextmanager
def _check_step_runs(model: Any) -> Iterator[None]:
    """Context manager after which the step of `DistributedStep` must have begun.

    Another one, which is not given what that step is given, may have failed.
    """
    try:
        yield
    except (StopIteration, tf.errors.OutOfRangeError):
        raise  # there was no batch
    except Exception:
        _check_has_run(model)
        raise
    _check_has_run(model)


def _say_own_draws(session: Session) -> None:
    """Say, after the first step, which random numbers are not those of one process."""
    draws, session.traced.noise.own_draws = session.traced.noise.own_draws, []
    if draws and session.decided.is_verbose and comm.rank() == 0:
        say(f"random numbers: each rank's own, from {', '.join(draws)}")


def _check_has_run(model: Any) -> None:
    if comm.size() > 1 and not session_of(model).has_run:
        override = "make_train_function` of its own"
        if "train_step" in vars(model):
            override = "train_step` that was set on the object"
        raise RuntimeError(
            "A batch was trained on without the `train_step` of the model's class, "
            "so the ranks do not have the same weights. Received: "
            f"{model.name!r} with a `{override}. Define `train_step` in the class, "
            "and let `make_train_function` return a new function that calls "
            "`self.train_step`."
        )


def _start(model: Any, batch: Any) -> None:
    """Build the model, copy it to all ranks and try its step, before it is traced."""
    session, own_step = session_of(model), own_train_step(model)
    build.start(model, batch, own_step, is_eager=model.run_eagerly)
    traced, is_averaged = session.traced, comm.size() > 1 and averages_gradients(model)
    if traced.trial is None and is_averaged and not losses.needs_no_trial(model):
        _try_step(model, batch)
    is_said = session.decided.is_verbose and session.decided.feed.plan.is_global
    if is_said and comm.rank() == 0 and trial.explain_untriable(batch) == trial.UNEVEN:
        say("batches: each on the first rank alone, since its tensors differ in length")
    global_rows = int(comm.sum(int(num_rows(batch))))
    traced.use_trial(traced.trial or trial.Trial(), global_rows, traced.runner)


def _try_step(model: Any, batch: Any) -> None:
    """Try the step; or again, if something was 0 before. All ranks call this."""
    session, traced = session_of(model), session_of(model).traced
    runner = traced.runner or trial.Runner(model, own_train_step(model))
    found, before = trial.try_step(runner, batch), traced.trial
    if session.decided.feed.plan.is_global:
        _check_batch_weights(model, batch, found.reason)
    if before is not None:  # and its states were named
        found = replace(before.add(found), states=())
    if str(found) != str(before):  # both with the seconds of the first
        trial.warn(model, found)
        if session.decided.is_verbose and comm.rank() == 0:
            say(f"gradients: {found}")
    traced.use_trial(found, traced.global_rows, runner)
    if before is not None and found.kinds != before.kinds:
        model.make_train_function(force=True)


def _check_batch_weights(model: Any, batch: Any, reason: str) -> None:
    """Raise a `ValueError` if a step fails on other rows than some weights have."""
    rows = int(num_rows(batch))
    sizes = {v.path: tuple(v.shape) for v in model.weights if rows in v.shape[:1]}
    if sizes and trial.ON_PART in reason:
        raise ValueError(
            "The step fails on a part of a batch, and weights have an entry for each "
            f"row, of which each rank has a part. Received: {reason}, and weights of "
            f"the shapes {sizes}. {_WHOLE_BATCHES}"
        )


@contextlib.contextmanager
def _explain_parts(session: Session) -> Iterator[None]:
    """Context manager that adds to an error of a step what a rank's batch is."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        found = session.traced.trial
        is_tried = found is not None and not found.reason
        if comm.size() > 1 and session.decided.feed.plan.is_global and not is_tried:
            error.add_note(
                "Each rank has a part of each batch. A step that runs on one process "
                "alone has a constant number of rows (take `keras.ops.shape(x)[0]`), "
                f"or a first axis that is not the rows. {_WHOLE_BATCHES}"
            )
        raise


def _results(
    model: Any,
    own_result: Callable[[], Any],
    logs: Any = None,
    *,
    is_over: bool = True,
) -> Any:
    session = session_of(model)
    if not session.runs_on_all():
        return own_result()
    seen = replace(session.update_counts(), is_over=is_over)
    starts = session.traced.starts
    sums: Any = session.traced.trial.summed_logs if session.traced.trial else ()
    if session.evaluation is not None and session.evaluation.is_dealt:
        sums = None
    return metrics.global_result(
        model.metrics, own_result, seen=seen, starts=starts, logs=logs, sums=sums
    )


def _after(data: Any) -> Any:
    """Context manager in which a graph does nothing before the batch was read."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    flat = tf.nest.flatten(data, expand_composites=True)
    leaves = [leaf for leaf in flat if leaf is not None]
    return tf.control_dependencies(leaves)
