"""The recipe: `dist_fit` and `DistributedModel`."""

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_dist import comm, optimizer, scaling, sharding, step, survey
from keras_dist.callbacks import is_writer
from keras_dist.callbacks.learning_rate_warmup import rate_factor_of_step
from keras_dist.checks import check_model
from keras_dist.job import Job, prepare
from keras_dist.options import Options

_ADVICE = "Start every rank with the same script, arguments and data."


def dist_fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | list[int] = 1,
    *,
    lr_scaling: scaling.LearningRateRule = "linear",
    warmup_epochs: float = 0,
    steps_scaling: scaling.StepsRule = "divide",
    validation_steps_scaling: scaling.StepsRule = "divide",
    shard: str = "auto",
    target_accuracy: float | None = None,
    op: str = "average",
    compression: str | None = None,
    local_layers: Sequence[Any] = (),
    process_set: Sequence[int] | None = None,
) -> keras.callbacks.History:
    """Train `model` on all ranks as `model.fit` trains it on one process.

    Every rank calls this with the same arguments. Gradients are averaged over the
    ranks before each update, so that all ranks hold the same weights at all times:
    those of one process with the global batch, `batch_size` × ranks. When it returns,
    the model is a plain Keras model again.

    Args:
        model: A compiled `keras.Model`.
        x, y, batch_size, epochs, verbose, callbacks, validation_split,
            validation_data, shuffle, class_weight, sample_weight, initial_epoch,
            steps_per_epoch, validation_steps, validation_batch_size,
            validation_freq: As in `keras.Model.fit`. `batch_size` is the batch of one
            rank; steps are those of a script for one process. Callbacks that write
            files run on the first rank only.
        lr_scaling: Factor on the learning rate: `"linear"` (the number of ranks),
            `"sqrt"` (its square root), `"none"`, a positive number, or a function of
            the number of ranks.
        warmup_epochs: Epochs over which the factor rises from 1, batch by batch.
        steps_scaling: What happens to `steps_per_epoch`: `"divide"` by the number of
            ranks, rounded up; `"none"`; or a function of (steps, size). With
            `"divide"`, a `LearningRateSchedule` is read at step × size.
        validation_steps_scaling: The same for `validation_steps`, or a number m for
            m × steps / size.
        shard: `"auto"`: arrays are dealt to the ranks row by row, data that comes in
            batches batch by batch where all ranks have the same batches. `"none"`: you
            have split all data.
        target_accuracy: Stop when `val_accuracy` has reached it: adds
            `StopAtAccuracy(target_accuracy)`.
        op, compression, local_layers, process_set: How gradients are averaged, as in
            `DistributedOptimizer`. In a process set, its ranks are all that there are:
            its first one prints and writes.

    Returns:
        The `History` of the fit, the same on every rank.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: On all ranks, if an argument is unusable or the ranks were given
            different models, rows or steps.
        RuntimeError: If a launcher started this process and Horovod is unusable, or
            if another rank's data raised an error.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = dist_fit(model, np.ones((8, 2)), np.ones(8), epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss', 'rows_per_second']
    """
    given = {name: value for name, value in locals().items() if name in _FIT_ARGUMENTS}
    options = Options(
        lr_scaling=lr_scaling,
        warmup_epochs=warmup_epochs,
        steps_scaling=steps_scaling,
        validation_steps_scaling=validation_steps_scaling,
        shard=shard,
        target_accuracy=target_accuracy,
        op=op,
        compression=compression,
        local_layers=local_layers,
        process_set=process_set,
    )
    with comm.within(process_set):
        given |= {name: survey.opened(given[name]) for name in ("x", "validation_data")}
        streams = {"training": given["x"], "validation": given["validation_data"]}
        same = survey.same_batches(streams, shard)
        seed = comm.broadcast(_seed_of_order(model))
        job = comm.together(
            lambda: prepare(model, given, options, seed=seed, same=same)
        )
        comm.agree(job.facts(), advice=_ADVICE)
        if comm.rank() == 0 and verbose != 0:
            _print(str(job.plan))
        with comm.explained(), distributed(model, job), sharding.own_errors(job.feeds):
            return model.fit(**job.arguments)


def _seed_of_order(model: Any) -> int:
    """A seed that follows from `keras.utils.set_random_seed` and draws nothing from it.

    Random numbers that the script draws later are those that it draws on one process.
    The updates made so far are added, so that the next fit has another order.
    """
    generator = random.Random()
    generator.setstate(random.getstate())
    made = getattr(getattr(model, "optimizer", None), "iterations", 0)
    return (generator.getrandbits(31) + int(made)) % 2**31


def _print(text: str) -> None:
    # A terminal that knows no box characters must not end the training.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


_FIT_ARGUMENTS = tuple(inspect.signature(keras.Model.fit).parameters)[1:]


@contextlib.contextmanager
def distributed(model: Any, job: Job) -> Iterator[None]:
    """Inside the block, `model` trains with the other ranks; then it is plain again."""
    with contextlib.ExitStack() as stack:
        session = step.install(model)
        stack.callback(step.uninstall, model)
        session.has_validation_rows = job.validation is None or job.validation.has_rows
        session.rows_of_all = job.training.rows_of_all
        for found in optimizer.optimizers_of(model):
            if comm.size() > 1:
                stack.enter_context(optimizer.averaging(found, job.averaging))
            stack.callback(optimizer.unscale_rate, found)
        # Only when all is built: a MultiOptimizer may not know its parts before.
        session.before_first_step.append(lambda: _scale_rates(model, job))
        yield


def _scale_rates(model: Any, job: Job) -> None:
    factor = rate_factor_of_step(full=job.factor, warmup_steps=job.warmup_steps)
    if factor is not None or job.stretch > 1:
        for found in optimizer.optimizers_of(model):
            optimizer.scale_rate(found, factor, stretch=job.stretch)


class DistributedModel:
    """A Keras model whose `fit` and `evaluate` use all ranks.

    Every other attribute, read or set, is the model's own: `compile`, `save`,
    `summary`, `weights` and so on.

    Args:
        model: A `keras.Model`.
        **options: Defaults for the arguments that `dist_fit` has and `Model.fit` does
            not: `lr_scaling`, `warmup_epochs`, `steps_scaling`,
            `validation_steps_scaling`, `shard`, `target_accuracy`, `op`,
            `compression`, `local_layers`, `process_set`.

    Raises:
        TypeError: If an option is unknown.

    >>> model = DistributedModel(keras.Sequential([keras.layers.Dense(1)]))
    >>> model.compile("sgd", "mse")
    >>> model.fit([[0.0]], [[1.0]], verbose=0).epoch  # doctest: +SKIP
    [0]
    """

    def __init__(self, model: Any, **options: Any) -> None:
        Options(**options)  # names are checked here, values when they are used
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "options", options)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """`dist_fit(model, …)`: all arguments of `keras.Model.fit`, and its own."""
        return dist_fit(self.model, *args, **{**self.options, **kwargs})

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """As `keras.Model.evaluate`: each row once over all ranks, exact metrics.

        Arrays are dealt to the ranks row by row. `steps` are those of one process and
        follow `validation_steps_scaling`.

        Returns:
            What `keras.Model.evaluate` returns for all rows, the same on every rank.
        """
        options = Options(**self.options)
        with comm.within(options.process_set):
            x = survey.opened(x)
            same = survey.same_batches({"validation": x}, options.shard)
            feed = comm.together(
                lambda: self._feed(
                    (x, y, sample_weight), batch_size, steps, options, same
                )
            )
            comm.agree(feed.facts, advice=_ADVICE)
            session = step.install(self.model)
            session.averages_metrics = True
            session.has_validation_rows = feed.has_rows
            is_first = comm.rank() == 0
            given = keras.tree.flatten(callbacks or [])
            try:
                return self.model.evaluate(
                    **feed.arguments,
                    batch_size=batch_size,
                    verbose=verbose if is_first else 0,
                    steps=feed.steps if steps else None,
                    callbacks=[c for c in given if is_first or not is_writer(c)]
                    or None,
                    return_dict=return_dict,
                )
            finally:
                step.uninstall(self.model)

    def _feed(
        self,
        parts: Any,
        batch_size: int | None,
        steps: int | None,
        options: Options,
        same: dict[str, bool],
    ) -> sharding.Feed:
        check_model(self.model)
        x, y, sample_weight = parts
        return sharding.validation_feed(
            x if y is None and sample_weight is None else parts,
            batch_size=batch_size,
            steps=steps,
            steps_rule=options.validation_steps_scaling,
            split=sharding.Split(comm.rank(), comm.size(), options.shard, same=same),
        )

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.predict`: every rank predicts all of the rows it is given."""
        return self.model.predict(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __repr__(self) -> str:
        return f"DistributedModel({self.model!r})"
