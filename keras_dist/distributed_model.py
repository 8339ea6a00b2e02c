"""A Keras model whose methods use all ranks: `DistributedModel`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import comm, mixin, sharding
from keras_dist.callbacks import on_this_rank, runs_on_first_rank_only
from keras_dist.fit import dist_fit
from keras_dist.setup import same_batches
from keras_dist.setup.checks import check_model
from keras_dist.setup.options import Options
from keras_dist.sharding import is_arrays
from keras_dist.training import step
from keras_dist.training.autotune import untuned
from keras_dist.training.metric_scope import EvaluatedData
from keras_dist.training.predict import predict_sharded, rows_to_predict
from keras_dist.training.predict_divided import is_divided_by_row, predict_divided
from keras_dist.training.same_values import agree_on_arrays

_ADVICE = "Start every rank with the same script, arguments and data."


class DistributedModel:
    """A Keras model whose `fit`, `evaluate` and `predict` use all ranks.

    All other attributes, such as `compile`, `save`, `summary` and `weights`, are read
    and set on the model itself.

    Args:
        model: A `keras.Model`.
        **options: Defaults for the arguments that `dist_fit` has and `Model.fit` does
            not: `lr_scaling`, `warmup_epochs`, `steps_scaling`,
            `validation_steps_scaling`, `shard`, `leftover`, `target_accuracy`, `op`,
            `compression`, `local_layers`, `process_set`, `sparse`, `resume`,
            `save_steps`, `save_seconds`, `report`.

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
        """`dist_fit(model, …)`: it has all arguments of `keras.Model.fit` and more."""
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

        Data is sharded as in `dist_fit`. `steps` are those of one process, to which
        `validation_steps_scaling` is applied.

        Returns:
            What `keras.Model.evaluate` returns for all rows, the same on every rank.
        """
        options = Options(**self.options)
        with comm.within(options.process_set):
            if comm.size() == 1:
                given = x, y, batch_size, verbose, sample_weight, steps, callbacks
                return self.model.evaluate(*given, return_dict=return_dict)
            x = comm.run_on_all(lambda: same_batches.opened(x, options.shard))
            spec = same_batches.shard_spec_of({"validation": x}, options)
            pieces = x, y, sample_weight
            feed = comm.run_on_all(
                lambda: self._feed(pieces, batch_size, steps, options, spec)
            )
            comm.agree(feed.facts, advice=_ADVICE)
            if options.shard != "none":
                names = ("x", "y", "sample_weight")
                agree_on_arrays(dict(zip(names, pieces, strict=True)))
            is_of_all = _evaluating(self.model, feed)
            reading = sharding.reading([feed])
            with comm.explained(), untuned(self.model), is_of_all, reading:
                return self.model.evaluate(
                    **feed.arguments,
                    batch_size=batch_size,
                    verbose=verbose if comm.rank() == 0 else 0,
                    steps=feed.steps if steps else None,
                    callbacks=on_this_rank(_flat(callbacks)) or None,
                    return_dict=return_dict,
                )

    def _feed(
        self,
        pieces: Any,
        batch_size: int | None,
        steps: int | None,
        options: Options,
        spec: sharding.ShardSpec,
    ) -> sharding.Feed:
        check_model(self.model)
        return sharding.validation_feed(
            pieces,
            batch_size=batch_size,
            steps=steps,
            steps_rule=options.validation_steps_scaling,
            spec=spec,
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        gather: bool = True,
    ) -> Any:
        """As `keras.Model.predict`: arrays are sharded by row, and results gathered.

        So are the results of a `tf.data.Dataset` that `keras_dist.shard` has divided by
        rows or batches. For other data (`tf.data.Dataset`, `PyDataset`, generator,
        ragged and sparse tensors), with `steps` for divided data, and for all data with
        `shard="none"`, each rank predicts everything that it was given, and nothing is
        gathered.

        Args:
            x, batch_size, verbose, steps, callbacks: As in `keras.Model.predict`.
                `batch_size` is the batch of one rank; `steps` are those of one process
                with that batch. Only the first rank prints, and runs callbacks that
                write files.
            gather: `False` to return only this rank's predictions, those of rows
                `[rank::size]`, if all are too large for memory or too slow to send.

        Returns:
            What `keras.Model.predict` returns for all rows, in their order, on every
            rank: an array, or a structure of arrays.

        Raises:
            ValueError: On all ranks, if there is no row, if rows or weights differ
                between the ranks, or if an output does not have one value for each row.
        """
        options = Options(**self.options)
        arguments = {
            "batch_size": batch_size,
            "verbose": verbose if comm.rank() == 0 else 0,
            "callbacks": [
                callback
                for callback in _flat(callbacks)
                if comm.rank() == 0 or not runs_on_first_rank_only(callback)
            ],
        }
        check_model(self.model, is_compiled=False)
        with comm.within(options.process_set), untuned(self.model):
            if comm.size() == 1 or options.shard == "none":
                return self.model.predict(x, steps=steps, **arguments)
            local = {id(w) for layer in options.local_layers for w in layer.weights}

            def predict(rows: Any) -> Any:
                return self.model.predict(rows, **arguments)

            def weights() -> list[Any]:
                return [w for w in self.model.weights if id(w) not in local]

            if gather and steps is None and is_divided_by_row(x):
                return predict_divided(x, predict, weights)
            if not is_arrays(x):
                return self.model.predict(x, steps=steps, **arguments)
            arrays = comm.run_on_all(
                lambda: rows_to_predict(x, batch_size=batch_size, steps=steps)
            )
            return predict_sharded(arrays, predict, weights, gather=gather)

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


def _flat(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks or [])


@contextlib.contextmanager
def _evaluating(model: Any, feed: sharding.Feed) -> Iterator[None]:
    """Inside the block, `model.evaluate` returns the metrics of all ranks.

    Args:
        model: A compiled model; it may be in the middle of a fit.
        feed: This rank's shard of the data.
    """
    is_training = mixin.has(model, step.DistributedStep)
    try:
        scope = step.install(model).metrics
        with scope.collective_evaluation(EvaluatedData(feed.has_rows, (feed,))):
            yield
    finally:
        if not is_training:
            step.uninstall(model)
