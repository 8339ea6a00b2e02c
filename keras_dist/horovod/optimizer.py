"""Horovod's optimizers by their names."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import comm
from keras_dist.horovod.averaging import average
from keras_dist.horovod.gradients import Settings, check_groups
from keras_dist.horovod.ops import Average, Compression, chosen
from keras_dist.horovod.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that averages its gradients over the ranks.

    Each rank counts the same, whatever rows it has. It averages wherever Keras or a
    script calls `apply` or `apply_gradients`, but for gradients that an `allreduce` or
    a `DistributedGradientTape` has returned.

    Args:
        optimizer: A Keras optimizer, which stays as it is.
        name, device_dense, device_sparse: Not needed: taken for scripts that pass them.
        compression: `Compression.fp16` sends two bytes a number.
        sparse_as_dense: Whether to send gradients of an `Embedding` whole; by default
            they are sent as rows if that is smaller.
        gradient_predivide_factor: Changes nothing but roundings.
        op: `Average` or `Sum`.
        backward_passes_per_step: Batches whose gradients are added before they are
            averaged. `iterations` counts batches.
        average_aggregated_gradients: Whether to divide that sum by their number.
        num_groups, groups: Checked; they change nothing but how gradients are sent.
        process_set: The ranks to average over; the others keep their own gradients.
        scale_local_gradients: Whether gradients of variables that were given to the
            result's `register_local_var` are divided by the number of ranks.

    Returns:
        An optimizer of the same class, name and state.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.
        ValueError: If an option cannot be used.

    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3))
    >>> optimizer.__class__ is keras.optimizers.Adam
    True
    """
    check_groups(groups, num_groups)
    settings = Settings(
        chosen(op),
        compression,
        sparse_as_dense,
        process_set,
        scale_local_gradients,
        backward_passes_per_step,
        average_aggregated_gradients,
    )
    comm.init()
    return average(_copied(optimizer), settings)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedOptimizer`, but the gradients of some layers are each rank's own.

    Args:
        optimizer: A Keras optimizer, which stays as it is.
        name, device_dense, device_sparse, groups: Not needed.
        compression, sparse_as_dense, gradient_predivide_factor, op, process_set: As in
            `DistributedOptimizer`.
        local_layers: A layer or a list of layers; they need not be built.
        scale_local_gradients: Whether their gradients are divided by the number of
            ranks.

    Returns:
        An optimizer of the same class, name and state.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.
        ValueError: If an option cannot be used, or `local_layers` are not layers.
    """
    check_groups(groups)
    settings = Settings(
        chosen(op), compression, sparse_as_dense, process_set, scale_local_gradients
    )
    layers = layers_of(local_layers)
    comm.init()
    return average(_copied(optimizer), settings, local_layers=layers)


def layers_of(local_layers: Any) -> Sequence[Any]:
    """A list of layers.

    Raises:
        ValueError: If it holds something else.
    """
    if isinstance(local_layers, keras.layers.Layer):
        return [local_layers]
    layers = list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "`local_layers` must be a layer or a list of layers. "
                f"Received: {layer!r} of type {type(layer).__name__}"
            )
    return layers


def _copied(optimizer: Any) -> Any:
    """A plain optimizer with the options and the state of this one."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "hvd.DistributedOptimizer needs a Keras optimizer, such as "
            f"keras.optimizers.Adam(). Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}"
        )
    try:
        copied = optimizer.__class__.from_config(optimizer.get_config())
    except Exception:  # for example a rate of a class that Keras does not know
        return optimizer  # and is then changed in place
    if optimizer.built:
        copied.build(list(optimizer._trainable_variables))
        pairs = zip(copied.variables, optimizer.variables, strict=True)
        for variable, own in pairs:
            variable.assign(own)
    return copied
