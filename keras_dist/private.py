"""Every private name of Keras and TensorFlow that this package uses.

Such names change without notice. So they stand in this file alone: the test
`tests/test_private.py` looks for each of them in the installed Keras and TensorFlow,
and for others in the rest of the package. A method that Keras calls on a mixin of this
package has to be defined in the mixin: `OVERRIDDEN`.
"""

import contextlib
import contextvars
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_dist import mixin

Result = TypeVar("Result")

# The state that Keras keeps for each thread: the dtype policy, scopes, counts of names;
# and what draws for functions of `keras.random` that are given no seed.
STATE, SEED_GENERATOR = "GLOBAL_STATE_TRACKER", "global_seed_generator"

# The methods that mixins define, and attributes of `self` that they read there.
OVERRIDDEN = {
    "_aggregate_additional_loss": "`Model`: a loss of `add_loss`, or a regularizer",
    "_get_metrics_result_or_logs": "`Model`: what the loops log after an epoch",
    "_moments": "`BatchNormalization`: mean and variance of the batch",
    "_reduction_axes": "`BatchNormalization`: the axes of `_moments`",
}

# An argument of `Model.evaluate`: whether `fit` calls it, for its validation.
CALLED_BY_FIT = "_use_cached_eval_dataset"

# `Metric`: the list of those metrics that are attributes of this one.
METRICS = "_metrics"

# `Model`: the epoch at which `fit` begins, as `BackupAndRestore` sets it.
INITIAL_EPOCH = "_initial_epoch"

# The file from which TensorFlow calls functions of Python.
_PY_FUNCTIONS = "tensorflow/python/ops/script_ops.py"

# So many functions may call another one in Python.
_MOST_NESTED = 8

# `Callback`: the attribute that its property `model` returns.
CALLBACK_MODEL = "_model"


def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in another thread, with the state that Keras has in this one.

    The other thread is outside of a graph that is being traced here.
    """
    state, context = keras_state(), contextvars.copy_context()

    def run() -> Result:
        keras_state().update(state)
        try:
            return context.run(function)
        finally:
            state.update(keras_state())

    with futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


def keras_state() -> dict[str, Any]:
    """Return what Keras keeps for this thread, by name."""
    # A public function of the module that has the state.
    return vars(keras.utils.clear_session.__globals__[STATE])


def skip_draws(state: Any, count: int, *, is_global: bool) -> Any:
    """Return the state of a `SeedGenerator` after so many draws.

    Args:
        state: The state before.
        count: Number of draws.
        is_global: Whether functions of `keras.random` without a seed draw from it.
    """
    if not is_global:
        return state + np.array([0, count], state.dtype)
    for _ in range(count):
        state = (state + 1) * 5387 % 933199
    return state


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """List all layers of a model; `model.layers` has only the outermost."""
    return list(model._flatten_layers(include_self=include_self))


def check_hooks(cls: type) -> None:
    """Raise an `AttributeError` if Keras does not call what a mixin of a model defines.

    Args:
        cls: The class of a model.
    """
    _ = cls._aggregate_additional_loss, cls._get_metrics_result_or_logs  # type: ignore[attr-defined]


def clear_losses(model: Any) -> None:
    """Forget the losses that layers have added, as in another graph."""
    model._clear_losses()


def build_by_keras(model: Any, data: Any) -> None:
    """Build model, metrics and losses from a batch, as Keras's `fit` does."""
    model._symbolic_build(data_batch=data)


def is_in_py_function() -> bool:
    """Return True if TensorFlow has called this, as it does to read data."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(frame.f_code.co_filename.endswith(_PY_FUNCTIONS) for frame in frames)


def compiled_parts(model: Any) -> tuple[Any, Any]:
    """Return the containers of losses and metrics that the last `compile` has made."""
    names = ("_compile_loss", "_compile_metrics")
    loss, metrics = (getattr(model, name, None) for name in names)
    return loss, metrics


def given_metrics(model: Any) -> list[Any]:
    """List the metrics that `compile` was given, which are built at the first batch."""
    compiled = compiled_parts(model)[1]
    names = ("_user_metrics", "_user_weighted_metrics")
    given = [getattr(compiled, name, None) for name in names]
    return [m for m in keras.tree.flatten(given) if isinstance(m, keras.metrics.Metric)]


def losses_in(compiled: Any) -> list[Any]:
    """List the losses in Keras's container of them; none before it is built."""
    return [part.loss for part in getattr(compiled, "_flat_losses", None) or ()]


def function_and_axis(metric: Any) -> tuple[Any, int]:
    """Return the function and the axis of a `MeanMetricWrapper`, else `None` and -1."""
    axis = getattr(metric, "_fn_kwargs", {}).get("axis", -1)
    return getattr(metric, "_fn", None), axis


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer gave its output; `None` for none."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Give a tensor a mask, unless it is `None`."""
    if mask is not None:
        tensor._keras_mask = mask


def logits_of(tensor: Any) -> Any:
    """Return the logits of probabilities, from which losses compute; `None` if none."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Give probabilities their logits, unless these are `None`."""
    if logits is not None:
        tensor._keras_logits = logits


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """List the variables that an optimizer updates; empty before it is built."""
    return list(getattr(optimizer, "_trainable_variables", None) or ())


def batches_of(optimizer: Any) -> Any:
    """Return the variable that counts batches; `iterations` counts updates."""
    return optimizer._iterations


def rate_of(optimizer: Any) -> Any:
    """Return the schedule, function or variable behind `learning_rate`."""
    return getattr(optimizer, "_learning_rate", None)


def accumulators(optimizer: Any, variables: Sequence[Any] | None = None) -> list[Any]:
    """List the variables in which Keras adds up the gradients of several batches.

    Args:
        optimizer: An optimizer with `gradient_accumulation_steps`, which is built.
        variables: The variables of the gradients; all of the optimizer for `None`.
    """
    sums = optimizer._accumulated_gradients
    if variables is None:
        return list(sums)
    return [sums[optimizer._get_variable_index(variable)] for variable in variables]


def is_compiled_by_xla() -> bool:
    """Return True where TensorFlow traces a function with `jit_compile=True`."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def momentums_of(optimizer: Any) -> list[Any]:
    """List the momentums of SGD, which are public, or of RMSprop."""
    names = ("momentums", "_momentums")
    return next((vars(optimizer)[n] for n in names if n in vars(optimizer)), [])


def inputs_of(dataset: Any) -> list[Any]:
    """List the data sets that a `tf.data.Dataset` was made of."""
    # `apply` of a function that returns its argument makes some their own input.
    return [one for one in dataset._inputs() if one is not dataset]


def variables_in(dataset: Any) -> list[Any]:
    """List the variables that a data set's own functions use."""
    return [v for f in dataset._functions() for v in f.function.graph.variables]


def cache_file(dataset: Any) -> Any:
    """Return where a data set is cached, as a tensor; `None` if it is not."""
    return getattr(dataset, "_filename", None)


def batch_rows(dataset: Any) -> Any:
    """Return the argument of `batch`, as a tensor; `None` for other data sets."""
    return getattr(dataset, "_batch_size", None)


def seeds_of(dataset: Any) -> tuple[Any, Any] | None:
    """Return both seeds of a shuffle or a random source; `None` for other data sets."""
    if hasattr(dataset, "_seed") and hasattr(dataset, "_seed2"):
        return dataset._seed, dataset._seed2
    return None


def is_reshuffled(dataset: Any) -> bool:
    """Return True if a shuffle or random source has another order in each pass."""
    names = ("_reshuffle_each_iteration", "_rerandomize")
    has_order = any(getattr(dataset, name, False) for name in names)
    return has_order and seeds_of(dataset) is not None


def global_seed() -> int | None:
    """Return the seed of `tf.random.set_seed`, by which Keras shuffles arrays.

    `None` if none was set: Keras draws one.
    """
    seed = tf.random.set_seed.__globals__["context"].global_seed()
    return None if seed is None else int(seed)


def random_operations(name: str) -> Any:
    """Return the module of the function by which TensorFlow draws from a counter."""
    draw = tf.random.stateless_uniform
    while hasattr(draw, "__wrapped__"):
        draw = draw.__wrapped__
    modules = "gen_stateless_random_ops_v2", "gen_stateless_random_ops"
    found = (draw.__globals__[module] for module in modules)
    return next(module for module in found if hasattr(module, name))


def stateful_random_operations() -> Any:
    """Return the module of the operations by which `tf.random` draws without a state.

    They draw from what the kernel of each keeps.
    """
    draw = tf.random.normal
    while hasattr(draw, "__wrapped__"):
        draw = draw.__wrapped__
    return draw.__globals__["gen_random_ops"]


def operation_seed_generator() -> Any:
    """Return the `random.Random` that gives operations without a seed theirs.

    It draws outside of graphs alone; `None` if no global seed was set.
    """
    return getattr(tf.random.set_seed.__globals__["context"].context(), "_rng", None)


@contextlib.contextmanager
def change_operation_seed(change: Callable[[int], int | None]) -> Iterator[None]:
    """Context manager that changes the seed of random operations, if one was set.

    `tf.random.set_seed` would also forget what was drawn so far.
    """
    # The second one is read outside of graphs, and where a graph is begun.
    eager = tf.random.set_seed.__globals__["context"]
    graph, holder = tf.compat.v1.get_default_graph(), eager.context()
    seeds = [s if s is None else change(s) for s in (graph.seed, holder._seed)]
    with mixin.change(graph, seed=seeds[0]), mixin.change(holder, _seed=seeds[1]):
        yield


def has_devices() -> bool:
    """Return True if TensorFlow has made its devices, as for the first tensor."""
    return bool(_eager()._initialized)


def start_collectives(cluster: Any, rank: int) -> None:
    """Start TensorFlow's server, and connect its collectives, before the first tensor.

    Args:
        cluster: A `tf.train.ClusterSpec` with the job "worker".
        rank: Number of this process among the workers.
    """
    context, leader = _eager(), "/job:worker/replica:0/task:0"
    context.configure_collective_ops(collective_leader=leader)
    config = context.config
    # Pieces of 4 KiB by default: a sum of 64 MiB then took 1.4 times the CPU time.
    config.experimental.recv_buf_max_chunk = 2**20
    server = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(),
        default_session_config=config,
        job_name="worker",
        task_index=rank,
        protocol="grpc",
    )
    context.enable_collective_ops(server)
    context.ensure_initialized()


def check_worker(rank: int, seconds: float) -> None:
    """Raise one of TensorFlow's errors if a worker does not answer for so long."""
    worker = f"/job:worker/replica:0/task:{rank}"
    _eager().check_collective_ops_peer_health(worker, int(seconds * 1000))


def abort_collectives(message: str) -> None:
    """Let all collectives of this process raise an `UnavailableError`, for good."""
    _eager().abort_collective_ops(tf.errors.UNAVAILABLE, message)


class Canceler:
    """What ends the functions of TensorFlow that run under it, also later ones.

    Each call gets a manager of its own, since the error of a function cancels its own.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self.managers: dict[int, deque[Any]] = {}  # of the last calls of each thread

    @property
    def _impl(self) -> Any:
        """What TensorFlow reads at each call."""
        manager = _cancellation().CancellationManager()
        latest = deque[Any](maxlen=_MOST_NESTED)
        self.managers.setdefault(threading.get_ident(), latest).append(manager)
        if self.is_cancelled:
            manager.start_cancel()
        return manager._impl

    def start_cancel(self) -> None:
        """End the functions that run, and all that begin later."""
        self.is_cancelled = True
        for managers in list(self.managers.values()):
            for manager in list(managers):
                manager.start_cancel()


def cancel_functions_by(canceler: Canceler | None) -> None:
    """Let functions that are called from now on, in any thread, obey a canceler."""
    _cancellation()._active_context = canceler


def _eager() -> Any:
    return tf.random.set_seed.__globals__["context"].context()


def _cancellation() -> Any:
    return tf.random.set_seed.__globals__["context"].cancellation
