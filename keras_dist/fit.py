"""`dist_fit`, and `DistributedModel`, whose methods use all ranks."""

import contextlib
import functools
import inspect
import os
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import keras

from keras_dist import comm, mixin, private
from keras_dist.allocator import keep_freed_memory
from keras_dist.callbacks.callback_order import on_this_rank
from keras_dist.callbacks.fit_hooks import TestReports, flatten_callbacks
from keras_dist.callbacks.user_callbacks import autolog_once, runs_here
from keras_dist.checkpoint import open_checkpoints, saving
from keras_dist.data import draws
from keras_dist.data.adapters import validation_feed
from keras_dist.data.arrays import is_arrays, lists_to_arrays
from keras_dist.data.division import StepsRule
from keras_dist.data.feed import Feed, raise_own_errors
from keras_dist.data.source import Source, is_alone
from keras_dist.errors import check_choice
from keras_dist.lines import find_caller, say, show, warn
from keras_dist.optimizer.attach import is_distributed
from keras_dist.optimizer.rate import LearningRateRule
from keras_dist.plan import draw_box
from keras_dist.setup import sources
from keras_dist.setup.arguments import Callbacks, Options
from keras_dist.setup.fit_setup import FitSetup, check_model, prepare
from keras_dist.training.install import (
    open_fit,
    reuse_train_function,
    turn_off_tuning,
)
from keras_dist.training.predict import predict_in_turns
from keras_dist.training.rows import most_mib
from keras_dist.training.same_values import agree_on_arrays
from keras_dist.training.session import session_of
from keras_dist.training.step import DistributedStep, PredictsAlone
from keras_dist.version import __version__

_ADVICE = "Start every rank with the same script, arguments and data."


def dist_fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
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
    batch: Literal["rank", "global"] = "rank",
    lr_scaling: LearningRateRule | Literal["auto"] = "auto",
    warmup_epochs: float = 0,
    steps_scaling: StepsRule = "auto",
    validation_steps_scaling: StepsRule = "auto",
    batch_norm: Literal["auto", "global", "rank"] = "auto",
    shard: Literal["auto", "none", "first"] = "auto",
    target_accuracy: float | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_steps: int | None = None,
    save_seconds: float | None = 300,
) -> keras.callbacks.History:
    """Train `model` on all ranks as `model.fit` trains it on one process.

    Every rank calls this with the same arguments. Gradients are averaged over the
    ranks before each update, so all ranks hold the same weights at all times: the
    weights of one process that trains with the global batch. The global batch is
    `batch_size` × ranks, or `batch_size` itself with `batch="global"`. When this
    returns, the model is a plain Keras model again.

    Args:
        model: A compiled `keras.Model`.
        x, y, batch_size, epochs, verbose, callbacks, validation_split,
            validation_data, shuffle, class_weight, sample_weight, initial_epoch,
            steps_per_epoch, validation_steps, validation_batch_size,
            validation_freq: As in `keras.Model.fit`. Pass steps as for one process.
            Keras's callbacks that write files run on the first rank only.
        batch: `"rank"`: `batch_size`, or a batch of a data set, sequence or generator,
            is the batch of one rank. N ranks train on N batches per step, and rates and
            steps are scaled. `"global"`: it is the batch of all ranks together; each
            rank computes its share of the rows, and nothing is scaled. The result is
            the model that `model.fit` gives.
        lr_scaling: Factor on the learning rate: `"linear"` (the number of ranks),
            `"sqrt"` (its square root), `"none"`, a positive number, or a function of
            the number of ranks. `"auto"`: linear, or none with `batch="global"`.
        warmup_epochs: Epochs over which the factor rises from 1, batch by batch.
        steps_scaling: Rule for `steps_per_epoch`: `"divide"` by the number of ranks,
            rounded up, or `"none"`. With `"divide"`, a `LearningRateSchedule` is read
            at step × size. `"auto"`: divide, or none with `batch="global"`.
        validation_steps_scaling: Like `steps_scaling`, for `validation_steps`.
        batch_norm: Whose mean and variance `BatchNormalization` uses in training.
            `"global"`: the mean and variance of all ranks' rows, as in one process, by
            two small collectives per layer and step. `"rank"`: of the rank's own rows,
            except in layers with `synchronized=True`. `"auto"`: the same as `batch`.
        shard: `"auto"`: arrays are sharded by row; data in batches is sharded by batch
            if all ranks have the same batches. `"none"`: you have already split all
            data. `"first"`: the first rank reads data in batches, and sends every batch
            to all ranks; use this for a loader that cannot be seeded.
        target_accuracy: Stop when `val_accuracy` reaches this value: adds
            `StopAtAccuracy(target_accuracy)`.
        resume: A folder for checkpoints, shared by all hosts. The same command
            continues from the last checkpoint, also in the middle of an epoch and on
            another number of ranks. After SIGTERM on any rank, all ranks save and exit
            with code 75.
        save_steps, save_seconds: With `resume`, the steps or seconds between
            checkpoints within an epoch; `None` turns the trigger off. The end of each
            epoch is always saved.

    Returns:
        The `History` of the fit, the same on every rank.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: On all ranks, if an argument is invalid, or if models, rows or
            steps differ between the ranks.
        RuntimeError: If a launcher started this process but Horovod cannot be used, or
            if another rank's data raised an error.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = dist_fit(model, np.ones((8, 2)), np.ones(8), epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss', 'rows_per_second']
    """
    arguments = dict(locals())
    options = {each.name: arguments.pop(each.name) for each in fields(Options)}
    return fit(arguments.pop("model"), arguments, Options(**options))


@comm.raise_on_all()
def fit(
    model: Any,
    arguments: dict[str, Any],
    options: Options,
    loop: Callable[..., Any] | None = None,
) -> keras.callbacks.History:
    """Train as `dist_fit`.

    Args:
        model: The model.
        arguments: Every argument of `Model.fit`.
        options: All other arguments of `dist_fit`.
        loop: Keras's own `fit` of the model. Default: the model's, which may prepare
            the data and then call Keras's own.
    """
    check_model(model)
    most_mib()
    options = options.resolve()
    data = sources.make_sources(arguments, options.shard)
    arguments = arguments | data
    with draws.enter_fit(comm.broadcast(draws.get_states())):
        return _train_on_data(model, arguments, options, loop)


def _train_on_data(
    model: Any,
    arguments: dict[str, Any],
    options: Options,
    loop: Callable[..., Any] | None,
) -> keras.callbacks.History:
    """Train as `train`, on data that is a `Source` or arrays."""
    data = {name: arguments[name] for name in sources.PIECES}
    seeds_of_order = _find_order_seed(model), private.global_seed()
    seed, keras_seed = comm.broadcast(seeds_of_order)
    compared = {"training": data["x"], "validation": data["validation_data"]}
    context = sources.compare(compared, options, seed=seed, keras_seed=keras_seed)
    if loop is not None:  # the script is one for one process
        sources.warn_about_own_data(compared, options.shard)
        _warn_about_backend()
    with open_checkpoints(options, context) as resumed:
        setup = prepare(
            model, arguments, options, resumed.context if resumed else context
        )
        comm.agree(setup.facts(), advice=_ADVICE)
        if options.shard != "none":
            agree_on_arrays(data)
        if comm.rank() == 0:
            _show_plan(setup.plan, is_shown=arguments["verbose"] != 0)
        with (
            open_fit(model, setup.decided) as session,
            raise_own_errors(session.feeds),
            _draw_own_numbers(setup, options),
            saving(resumed, setup) as arguments,
            autolog_once(),
        ):
            if resumed is None:
                reuse_train_function(model)
            return run_loop(model, "fit", arguments, loop)


def _warn_about_backend() -> None:
    """Warn on the first rank if the script has asked for another backend of Keras."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow" and comm.rank() == 0:
        warn(
            "Keras trains with TensorFlow: it was imported before the script's first "
            f"line. Received: KERAS_BACKEND={backend}. Take that line out."
        )


_shown_sizes: set[int] = set()  # numbers of ranks that the script was told


def _show_plan(lines: list[tuple[str, str]], *, is_shown: bool) -> None:
    """Show the plan; else one line, the first time, with the number of ranks."""
    title, size = f"keras_dist {__version__}", comm.size()
    if is_shown:
        show(draw_box(title, lines))
    elif size > 1 and size not in _shown_sizes:
        say(f"{title}: fit runs on {size} ranks")
    _shown_sizes.add(size)


@contextlib.contextmanager
def _draw_own_numbers(setup: FitSetup, options: Options) -> Iterator[None]:
    """Context manager in which a rank that reads data of its own draws its own."""
    source = setup.decided.feed.source
    is_own = isinstance(source, Source) and not (
        source.is_replicated or source.presharded
    )
    if comm.size() > 1 and (is_own or options.shard == "none"):
        draws.draw_rank_numbers(comm.rank())
    try:
        yield
    finally:
        draws.draw_common_numbers()


def _find_order_seed(model: Any) -> int:
    """A seed that depends on `keras.utils.set_random_seed`, without drawing from it.

    So the script later draws the same random numbers as on one process. The number of
    updates so far is added to the seed: the next fit shuffles in another order.
    """
    made = getattr(getattr(model, "optimizer", None), "iterations", 0)
    with draws.preserve_generators():
        return (random.getrandbits(31) + int(made)) % 2**31


# The model and the method whose next call is one of ours, for Keras's own loop.
_passing: ContextVar[tuple[int, str] | None] = ContextVar("passing", default=None)


def run_loop(
    model: Any,
    name: str,
    arguments: dict[str, Any],
    loop: Callable[..., Any] | None = None,
) -> Any:
    """Call `fit`, `evaluate` or `predict` of a model with the arguments of Keras's.

    A method of the model's class may take others: then Keras's own is called.

    Args:
        model: The model.
        name: Name of the method.
        arguments: Keyword arguments.
        loop: Keras's own method of the model, if it was called, and not the model's.
    """
    keep_freed_memory()
    is_override = loop is None and _takes_data(getattr(model.__class__, name))
    with contextlib.ExitStack() as stack:
        stack.enter_context(turn_off_tuning(model))
        if name == "predict":
            stack.enter_context(mixin.use(model, PredictsAlone))
        if loop is None:
            token = _passing.set((id(model), name))
            stack.callback(_passing.reset, token)
            loop = functools.partial(getattr(keras.Model, name), model)
        if is_override:
            is_ours = mixin.has(model, DistributedStep)  # for calls of other callers
            loop = getattr(super(DistributedStep, model) if is_ours else model, name)
        return loop(**arguments)


def is_plain(model: Any, name: str) -> bool:
    """Return True for Keras's own method: `run_loop` calls it, or one rank alone."""
    is_ours = _passing.get() == (id(model), name)
    if is_ours:
        _passing.set(None)  # a callback may call it once more, for all ranks
    return is_ours or is_alone() or comm.is_rank_child()


def _takes_data(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "x" in parameters or inspect.Parameter.VAR_POSITIONAL in kinds


@comm.raise_on_all()
def evaluate(
    model: Any,
    arguments: dict[str, Any],
    options: Options,
    loop: Callable[..., Any] | None = None,
) -> Any:
    """Evaluate as `DistributedModel.evaluate`, with its `arguments`."""
    if comm.size() == 1:
        return run_loop(model, "evaluate", arguments, loop)
    check_model(model)
    options = options.resolve()
    names = ("x", "y", "sample_weight")
    pieces = {name: lists_to_arrays(arguments[name]) for name in names}
    pieces["x"] = sources.make_source(pieces["x"], options.shard)
    feed = _make_feed(model, "validation", pieces, arguments, options)
    local = arguments | feed.arguments | {"steps": feed.keras_steps}
    callbacks = flatten_callbacks(arguments["callbacks"])
    local["callbacks"] = [TestReports(), *on_this_rank(callbacks)]
    if comm.rank() > 0:
        local["verbose"] = 0
    is_open = mixin.has(model, DistributedStep)
    with (
        contextlib.nullcontext() if is_open else open_fit(model),
        session_of(model).evaluate(model, feed, sums_metrics=True),
    ):
        return run_loop(model, "evaluate", local, loop)


def predict(
    model: Any,
    arguments: dict[str, Any],
    options: Options,
    loop: Callable[..., Any] | None = None,
    *,
    gather: bool | Literal["first"] = True,
) -> Any:
    """Predict as `DistributedModel.predict`, with its `arguments`."""
    x, steps = arguments["x"], arguments["steps"]
    callbacks = list(filter(runs_here, flatten_callbacks(arguments["callbacks"])))

    def predict_rows(rows: Any, steps: int | None = None) -> Any:
        local = arguments | {"x": rows, "steps": steps, "callbacks": callbacks}
        if comm.rank() > 0:
            local["verbose"] = 0
        return run_loop(model, "predict", local, loop)

    if comm.size() == 1 or options.shard == "none":
        _check_predict(model, gather)
        return predict_rows(x, steps)  # one rank may call it alone
    with comm.raise_on_all():
        _check_predict(model, gather)
        # Batches stay whole, and `steps` counts steps of one process.
        options = replace(options, batch="global", validation_steps_scaling="none")
        options = options.resolve()
        x = sources.make_source(lists_to_arrays(x), options.shard)
    is_source = isinstance(x, Source)
    is_divided = is_source and x.presharded is not None
    leaves = keras.tree.flatten(x) if is_arrays(x) else []
    facts = {  # what decides which collectives come
        "`gather`": gather,
        "`steps`": steps,
        "the shapes of the rows": [tuple(leaf.shape) for leaf in leaves],
        "whether the data comes in batches": is_source,
        "whether the data was divided by `shard`": is_divided,
    }
    comm.agree(facts, advice=_ADVICE)
    if is_divided and gather:
        raise ValueError(
            "Predictions of data that `keras_dist.shard` has divided are not gathered. "
            f"Received: gather={gather!r}. Pass gather=False, or the data without "
            "`shard`."
        )
    if is_divided or not (leaves or is_source):
        return predict_rows(x.data if is_source else x, steps)
    pieces = {"x": x, "y": None, "sample_weight": None}
    feed = _make_feed(model, "predicted", pieces, arguments, options)
    with raise_own_errors([feed]):
        if is_source and not x.is_replicated:
            return predict_rows(feed.data, steps)
        if mixin.has(model, DistributedStep) and (hooks := session_of(model).hooks):
            hooks.predict_begin()
        return predict_in_turns(feed, predict_rows, model, gather=gather)


def call_on_batch(model: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model's `train_on_batch` or `test_on_batch`, unless models would drift."""
    name, size = method.__name__, comm.job_world().size
    averages = is_distributed(getattr(model, "optimizer", None))
    if averages or is_plain(model, name) or size == 1:
        return method(*args, **kwargs)
    raise RuntimeError(
        f"`{name}` computes on one rank alone, so that the models of the ranks would "
        f"drift apart. Received: a call on {size} ranks, at {find_caller()}. Compile "
        "the model with keras_dist.DistributedOptimizer, give each rank its own rows, "
        "and take averages by keras_dist.average; or call `fit`."
    )


@comm.raise_on_all()
def _make_feed(
    model: Any,
    name: str,
    pieces: dict[str, Any],
    arguments: dict[str, Any],
    options: Options,
) -> Feed:
    """Make this rank's feed of data that all ranks evaluate, or predict."""
    context = sources.compare({name: pieces["x"]}, options)
    context = replace(context, steps_per_execution=model.steps_per_execution)
    feed = validation_feed(
        tuple(pieces.values()),
        batch_size=arguments["batch_size"],
        steps=arguments["steps"],
        steps_rule=options.validation_steps_scaling,
        context=context,
    )
    comm.agree(feed.facts, advice=_ADVICE)
    if options.shard != "none":
        agree_on_arrays(pieces)
    return feed


def _check_predict(model: Any, gather: bool | Literal["first"]) -> None:
    check_model(model, is_compiled=False)
    check_choice("gather", gather, (True, False, "first"))


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _with_arguments_of(
    function: Callable[Concatenate[Any, _P], _R],
) -> Callable[[Callable[..., _R]], Callable[Concatenate[Any, _P], _R]]:
    return lambda method: _add_parameters(method, function)


def _with_options_of(
    options: Callable[_P, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, keras.Model, _P], None]]:
    return lambda method: _add_parameters(method, options)


def _add_parameters(method: Any, function: Callable[..., Any]) -> Any:
    """Give a method the parameters of a function of a model, for tools and `help`."""
    found, named = inspect.signature(method), inspect.signature(function)
    is_open = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kept = [p for p in found.parameters.values() if p.kind not in is_open]
    more = [p for name, p in named.parameters.items() if name != "model"]
    method.__signature__ = found.replace(parameters=[*kept, *more])
    return method


class DistributedModel:
    """A Keras model whose `fit`, `evaluate` and `predict` use all ranks.

    All other attributes, such as `compile`, `save`, `summary` and `weights`, are read
    and set on the model itself.

    Args:
        model: A `keras.Model`.
        batch, lr_scaling, warmup_epochs, steps_scaling, validation_steps_scaling,
            batch_norm, shard, target_accuracy, resume, save_steps,
            save_seconds: Defaults for these arguments of `fit`. See `dist_fit`.

    Raises:
        TypeError: If an option is unknown.
        RuntimeError: Later, on several ranks, if `train_on_batch` or `test_on_batch` is
            called without a `DistributedOptimizer`.

    Example:

    >>> import numpy as np
    >>> model = DistributedModel(keras.Sequential([keras.layers.Dense(1)]))
    >>> model.compile("sgd", "mse")
    >>> model.fit(np.ones((8, 2)), np.ones(8), verbose=0).epoch
    [0]
    """

    @_with_options_of(Options)
    def __init__(self, model: keras.Model, **options: Any) -> None:
        Options(**options)  # names are checked here, values when they are used
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "options", options)

    @_with_arguments_of(dist_fit)
    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train as `dist_fit` does, with the same arguments except `model`.

        Returns:
            The `History` of the fit, the same on every rank.
        """
        return dist_fit(self.model, *args, **{**self.options, **kwargs})

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluate each row on one rank, and return the metrics of all rows.

        Data is sharded as in `dist_fit`.

        Args:
            x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict: As
                in `keras.Model.evaluate`. `batch_size` is the batch of one rank. Pass
                `steps` as for one process; `validation_steps_scaling` is applied. Only
                the first rank prints and runs Keras's callbacks that write files.

        Returns:
            What `keras.Model.evaluate` returns for all rows, the same on every rank.

        Raises:
            TypeError: On all ranks, if the model is not a Keras model.
            ValueError: On all ranks, if the model is not compiled, an argument or
                option is invalid, or rows or steps differ between the ranks.
            RuntimeError: If another rank has ended, or its data raised an error.

        Example:

        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> found = DistributedModel(model).evaluate(x, y, verbose=0, return_dict=True)
        >>> sorted(found)
        ['loss', 'mae']
        """
        arguments = dict(locals())
        del arguments["self"]
        return evaluate(self.model, arguments, Options(**self.options))

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        *,
        gather: bool | Literal["first"] = True,
    ) -> Any:
        """Predict each row on one rank, and gather the predictions of all rows.

        Rank r of N predicts the batches r, r + N, …. Data that differs between ranks is
        treated as already split: as with `shard="none"`, each rank predicts everything
        that it was given, and nothing is gathered. Data that `keras_dist.shard` has
        divided needs `gather=False`.

        Args:
            x, batch_size, verbose, steps, callbacks: As in `keras.Model.predict`.
                `batch_size` is the batch of one rank. Pass `steps` as for one process
                with that batch size. Only the first rank prints and runs Keras's
                callbacks that write files.
            gather: `True` to return all predictions on every rank. `"first"` to return
                them on the first rank only, and `None` on the others, which saves their
                memory. `False` to return only this rank's predictions, for predictions
                that are too large for memory or too slow to send.

        Returns:
            What `keras.Model.predict` returns for all rows, in their order, on every
            rank: an array, or a structure of arrays.

        Raises:
            ValueError: On all ranks, if there is no row, if rows or weights differ
                between the ranks, or if data is shuffled differently on each rank.

        Example:

        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> DistributedModel(model).predict(np.ones((8, 2)), verbose=0).shape
        (8, 1)
        """
        arguments = dict(locals())
        del arguments["self"], arguments["gather"]
        return predict(self.model, arguments, Options(**self.options), gather=gather)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # A copy that is being made has no model yet, and its methods are not those.
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.model, name)
        if name not in ("train_on_batch", "test_on_batch"):
            return value
        call = functools.partial(call_on_batch, self.model, value)
        return functools.wraps(value)(call)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __repr__(self) -> str:
        return f"DistributedModel({self.model!r})"
