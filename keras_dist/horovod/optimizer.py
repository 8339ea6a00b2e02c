"""Optimizers and tapes that average as Horovod's do, and its batch normalization.

`compile` lets the outermost optimizer average, and so does `load_model`.
"""

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.errors import check_count
from keras_dist.horovod.collectives import (
    Average,
    Compression,
    Sum,
    is_reduced,
    mark_reduced,
    no_autograph,
    reduction,
)
from keras_dist.optimizer import attach, step_context
from keras_dist.optimizer.nested import leaves, nested_optimizers, variables_of
from keras_dist.optimizer.reduce import Averaging, exchange
from keras_dist.optimizer.sparse import with_shape
from keras_dist.training.batch_norm import GlobalMoments


def make_options(op: int, compression: Compression) -> Averaging:
    """Return the options of `keras_dist.DistributedOptimizer` for two of Horovod's.

    Raises:
        ValueError: If one of them cannot be used for gradients.
    """
    if reduction(op) not in (Average, Sum):
        raise ValueError(
            f"`op` of gradients must be hvd.Average or hvd.Sum. Received: op={op!r}"
        )
    if not isinstance(compression, Compression):
        raise ValueError(
            "`compression` must be hvd.Compression.none or hvd.Compression.fp16. "
            f"Received: compression={compression!r}"
        )
    is_half = compression is Compression.fp16
    return Averaging("sum" if op == Sum else "average", "fp16" if is_half else None)


def check_all_ranks(process_set: Any) -> None:
    """Check that gradients or metrics are asked for of all ranks.

    Raises:
        ValueError: If a process set is given that is not Horovod's global one.
    """
    if process_set is not None and process_set.process_set_id != 0:
        raise ValueError(
            "All ranks train one model, so gradients and metrics are averaged over all "
            f"ranks. Received: process_set={process_set}. Leave it out, and start a "
            "job for each model."
        )


def DistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that averages its gradients over the ranks.

    Each rank has the same weight, whatever the number of its rows. The optimizer
    averages when Keras or a script calls `apply` or `apply_gradients`, except for
    gradients returned by an `allreduce` or a `DistributedGradientTape`.

    Args:
        optimizer: A Keras optimizer, which is changed in place.
        compression: `Compression.fp16` sends two bytes per number.
        sparse_as_dense: Whether to send gradients of an `Embedding` as full tensors; by
            default, they are sent as rows if that is smaller.
        op: `Average` or `Sum`.
        backward_passes_per_step: Number of batches whose gradients are added before
            they are averaged. `iterations` counts batches.
        average_aggregated_gradients: Whether to divide the sum by this number.
        process_set: Must be all ranks, or `None`.
        name, device_dense, device_sparse, gradient_predivide_factor, num_groups,
            groups, scale_local_gradients: Ignored: they control how Horovod sends
            gradients.

    Returns:
        The same object. Its class does not change.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.
        ValueError: If an option cannot be used.

    Example:

    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3))
    >>> optimizer.__class__ is keras.optimizers.Adam
    True
    """
    check_all_ranks(process_set)
    passes = check_count("backward_passes_per_step", backward_passes_per_step)
    options = make_options(op, compression)
    attach.DistributedOptimizer(
        optimizer, op=options.op, compression=options.compression
    )
    is_mean = average_aggregated_gradients
    _add_passes(optimizer, Passes(passes, is_mean=is_mean, is_dense=sparse_as_dense))
    return optimizer


@dataclass
class Passes:
    """Options and state of the accumulation of gradients.

    Args:
        number: Batches whose gradients are added before they are averaged.
        is_mean: Whether their sum is divided by their number.
        is_dense: Whether gradients of an `Embedding` are sent whole.
        sums: Sums of gradients since the last update, by the identity of the variable.
        count: How many gradients they are sums of; a variable, or `None` before.
    """

    number: int = 1
    is_mean: bool = False
    is_dense: bool = False
    sums: dict[int, Any] = field(default_factory=dict)
    count: Any = None


def _add_passes(optimizer: Any, passes: Passes) -> None:
    # Keras does not track attributes that are set so; it would save them.
    object.__setattr__(optimizer, "_passes", passes)
    mixin.add(optimizer, AppliesLikeHorovod)


def move_to_outermost(outer: Any) -> None:
    """Let the outermost optimizer average, if one inside of it does so far."""
    attach.move_to_outermost(outer)
    for part in nested_optimizers(outer)[1:]:
        is_ours = mixin.has(part, AppliesLikeHorovod)
        if is_ours and not mixin.has(outer, AppliesLikeHorovod):
            _add_passes(outer, Passes(is_dense=part._passes.is_dense))


def is_next_an_update(outer: Any) -> bool:
    """Return True if the next batch ends with an update."""
    found = (vars(p).get("_passes") for p in nested_optimizers(outer))
    return all(
        passes is None
        or (0 if passes.count is None else int(passes.count)) == passes.number - 1
        for passes in found
    )


class AppliesLikeHorovod:
    """Mixin over `ReducesGradients`: what Horovod does before the average."""

    _passes = Passes()

    @no_autograph
    def apply(
        self: Any, grads: Any, trainable_variables: Any = None, **more: Any
    ) -> Any:
        apply = functools.partial(super().apply, **more)  # type: ignore[misc]
        grads, passes = list(grads), self._passes
        known = variables_of(self, trainable_variables)
        present = [gradient for gradient in grads if gradient is not None]
        context = step_context.current()
        if not context.is_averaged and present and all(map(is_reduced, present)):
            with step_context.enter(replace(context, is_averaged=True)):
                return AppliesLikeHorovod.apply(
                    self, grads, trainable_variables, **more
                )
        if passes.number > 1 or (passes.is_dense and not context.is_averaged):
            grads = [
                g if g is None else tf.convert_to_tensor(with_shape(g, variable))
                for g, variable in zip(grads, known, strict=True)
            ]
        is_update = context.is_averaged and not all(map(is_reduced, present))
        if passes.number == 1 or is_update:
            return apply(grads, trainable_variables)
        if step_context.is_inside() and not context.is_averaged:
            raise ValueError(
                "`dist_fit` does not add up batches as Horovod does. Received: "
                f"backward_passes_per_step={passes.number}. Give Keras's optimizer "
                "`gradient_accumulation_steps` instead."
            )
        return _add(self, grads, known, apply)


def _add(own: Any, gradients: list[Any], known: list[Any], apply: Any) -> None:
    """Add a batch's gradients to those before; average and update if it is time."""
    passes: Passes = own._passes
    pairs = [p for p in zip(gradients, known, strict=True) if p[0] is not None]
    variables = [variable for _, variable in pairs]
    with tf.init_scope():
        if not own.built:
            own.build(known)
        if passes.count is None:
            passes.count = tf.Variable(0, trainable=False)
        for gradient, variable in pairs:
            if id(variable) not in passes.sums:
                zeros = tf.zeros(tuple(variable.shape), gradient.dtype)
                passes.sums[id(variable)] = tf.Variable(zeros, trainable=False)
    sums = [passes.sums[id(variable)] for variable in variables]
    for own_sum, (gradient, _) in zip(sums, pairs, strict=True):
        own_sum.assign_add(gradient)
    divisor = passes.number if passes.is_mean else 1

    def make_update() -> Any:
        apply([own_sum.value() / divisor for own_sum in sums], variables)
        for own_sum in sums:
            own_sum.assign(tf.zeros_like(own_sum))
        passes.count.assign(0)
        return tf.constant(True)

    def only_count() -> Any:
        # Horovod counts batches, and so do the rates that depend on the count.
        for leaf in leaves(own):
            private.batches_of(leaf).assign_add(1)
        return tf.constant(False)

    is_due = tf.equal(passes.count.assign_add(1), passes.number)
    tf.cond(is_due, make_update, only_count)


def DistributedGradientTape(  # noqa: N802 - Horovod's own name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape return gradients averaged over all ranks.

    An optimizer of this module does not average them again.

    Args:
        gradtape: A `tf.GradientTape`, which is changed in place.
        compression: `Compression.fp16` sends two bytes per number.
        sparse_as_dense: Whether to send gradients of an `Embedding` as full tensors.
        op: `Average` or `Sum`.
        process_set: Must be all ranks, or `None`.
        device_dense, device_sparse, gradient_predivide_factor, num_groups, groups,
            scale_local_gradients: Ignored: they control how Horovod sends gradients.

    Returns:
        The same tape.

    Raises:
        ValueError: If an option cannot be used.

    Example:

    >>> x = tf.Variable(3.0)
    >>> with DistributedGradientTape(tf.GradientTape()) as tape:
    ...     y = x * x
    >>> float(tape.gradient(y, x))
    6.0
    """
    check_all_ranks(process_set)
    gradtape._options = make_options(op, compression)
    gradtape._is_dense = sparse_as_dense
    comm.init()
    mixin.add(gradtape, ReducesTape)
    return gradtape


class ReducesTape:
    """Mixin for a tape that averages its gradients over all ranks."""

    _options: Averaging
    _is_dense: bool

    @no_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Gradients of `target`, over all ranks, in the structure of `sources`."""
        del use_generic_names  # our names never depend on names of variables
        local = super().gradient(target, sources, output_gradients, *args, **kwargs)  # type: ignore[misc]
        flat: list[Any] = tf.nest.flatten(local)
        present = [
            (index, with_shape(flat[index], variable))
            for index, variable in enumerate(tf.nest.flatten(sources))
            if flat[index] is not None
        ]
        if comm.size() > 1 and present:
            gradients = [gradient for _, gradient in present]
            if self._is_dense:
                gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            key = tuple(map(id, tf.nest.flatten(sources)))
            name = comm.name_of("horovod.gradients", key)
            reduced = exchange(gradients, 1, self._options, is_merged=True, name=name)
            for (index, gradient), value in zip(present, reduced, strict=True):
                flat[index] = mark_reduced(tf.cast(value, gradient.dtype))
        return tf.nest.pack_sequence_as(sources, flat)


@keras.saving.register_keras_serializable(package="keras_dist.horovod")
class SyncBatchNormalization(GlobalMoments, keras.layers.BatchNormalization):
    """`BatchNormalization` that uses mean and variance of the rows of all ranks.

    Args:
        fused: Must be `False`.
        **kwargs: Arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: If `fused` is `True` or `None`.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), SyncBatchNormalization()])
    >>> model.output_shape
    (None, 2)
    """

    in_loops = True

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                "SyncBatchNormalization cannot be fused. Received: fused="
                f"{fused}. Leave it out."
            )
        super().__init__(**kwargs)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compression = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with its optimizer, and make the optimizer average over the ranks.

    This calls no collective, so a single rank may load a model.

    Args:
        filepath: A `.keras` file.
        custom_optimizers: Optimizer classes that Keras does not have.
        custom_objects: Other classes and functions, by name.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Ignored; accepted for compatibility.

    Returns:
        A compiled model with its weights and the state of its optimizer.

    Raises:
        ValueError: If the file is not a model; or if it is an HDF5 file, from which
            Keras 3 does not restore the optimizer's state.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.keras")
    ...     loaded = load_model(f"{folder}/model.keras")
    >>> loaded.optimizer.__class__ is keras.optimizers.SGD
    True
    """
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects |= dict(custom_objects or {})
    if h5py.is_hdf5(filepath):
        raise ValueError(
            "Keras 3 does not restore the state of an optimizer from an HDF5 file, so "
            f"the training would not go on where it was. Received: {filepath!s}. Save "
            'the model as "model.keras". A file of Keras 2 is read by tf_keras.'
        )
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        adapt(model)
    return model


def install() -> None:
    """Change `compile` of Keras's models.

    Scripts of Horovod pass an argument that Keras 3 does not know. Where mixed
    precision wraps an optimizer, the outer one has to average. XLA cannot compile a
    collective.
    """
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    plain = vars(owner)["compile"]

    @functools.wraps(plain)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("experimental_run_tf_function", None) is not None:
            warnings.warn(
                "`experimental_run_tf_function` is left out: Keras 3 does not know "
                "this argument of `compile`. Remove it.",
                stacklevel=2,
            )
        plain(model, *args, **kwargs)
        adapt(model)

    owner.compile = compile


def adapt(model: Any) -> None:
    """Let a compiled model's outermost optimizer average, outside of XLA."""
    outermost = getattr(model, "optimizer", None)
    if outermost is None or comm.size() == 1:
        return
    if attach.is_distributed(outermost):
        move_to_outermost(outermost)
        model.jit_compile = False
