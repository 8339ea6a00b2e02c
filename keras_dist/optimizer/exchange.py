"""The allreduce of gradients, with their weights and the stop request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import sparse, step_context
from keras_dist.optimizer.options import Averaging


def exchange(
    gradients: Sequence[Any], weight: Any, options: Averaging, *, name: str
) -> tuple[list[Any], Any]:
    """Reduce gradients over all ranks; dense ones of a dtype by one collective.

    Args:
        gradients: Tensors or `tf.IndexedSlices`, of the same kinds and shapes on all
            ranks.
        weight: The weight of this rank's gradients in an average: the rows that they
            are a mean over. `None`: they have been multiplied by their weights.
        options: The options of the averaging.
        name: A fixed name, the same on all ranks: Horovod matches collectives by name.

    Returns:
        For each gradient the weighted mean over all ranks, the sum, or the adaptive
        sum, as float32, or float64 if the gradient is that; and the sum of the weights.
        They are tensors, but the slices of all ranks for `tf.IndexedSlices` that are
        not merged.
    """
    if weight is None:
        options = replace(options, op="sum")
    if options.op != "average":
        weight = 1
    if options.op == "adasum":  # it compares whole gradients
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    result: list[Any] = [None] * len(gradients)
    total: Any = None
    wires = [_wire_of(gradient) for gradient in gradients]
    for wire in sorted(set(wires), key=str):
        indices = [index for index, own in enumerate(wires) if own == wire]
        summed, total = _sums(
            [gradients[index] for index in indices],
            tf.cast(weight, wire),
            options,
            name=f"{name}.{wire.name}",
        )
        for index, gradient in zip(indices, summed, strict=True):
            result[index] = gradient
    return result, total


def _sums(
    gradients: list[Any], weight: Any, options: Averaging, *, name: str
) -> tuple[list[Any], Any]:
    """As `exchange`, for gradients that are all sent in the dtype of `weight`."""
    wire = weight.dtype
    is_rows = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    both = list(zip(gradients, is_rows, strict=True))
    rows = [gradient for gradient, is_sparse in both if is_sparse]
    dense = [tf.cast(gradient, wire) for gradient, is_sparse in both if not is_sparse]
    counts = []
    if options.sparse == "merged":
        rows = [sparse.merged(gradient) for gradient in rows]
        counts = [sparse.counts_of_ranks(gradient, wire) for gradient in rows]
    sums, total, counts = _dense_sums(dense, weight, counts, options, name=name)
    of_rows = _sums_of_rows(rows, weight, total, counts, options, name=name)
    kinds = {True: iter(of_rows), False: iter(sums)}
    return [next(kinds[is_sparse]) for is_sparse in is_rows], total


def _sums_of_rows(
    rows: list[Any],
    weight: Any,
    total: Any,
    counts: list[Any],
    options: Averaging,
    *,
    name: str,
) -> list[Any]:
    """Means or sums of sparse gradients: whole ones if merged, otherwise slices.

    Args:
        rows: The gradients; if they are to be merged, each row once.
        weight: The weight of this rank's gradients.
        total: The sum of the weights.
        counts: If they are merged, the number of rows of each rank for each gradient.
        options: The options of the averaging.
        name: A fixed name, the same on all ranks.
    """
    is_mean = options.op == "average"
    result: list[Any] = []
    for index, own in enumerate(rows):
        own_name, shape = f"{name}.{index}", tuple(own.shape)
        values = tf.cast(own.values, weight.dtype)
        weighted = tf.IndexedSlices(values * weight if is_mean else values, own.indices)
        if options.sparse == "merged":
            whole = sparse.sum_of_ranks(weighted, shape, counts[index], name=own_name)
            result.append(whole / total if is_mean else whole)
        else:
            all_rows = sparse.gathered(weighted, shape, name=own_name)
            divided = all_rows.values / total if is_mean else all_rows.values
            slices = tf.IndexedSlices(divided, all_rows.indices, all_rows.dense_shape)
            result.append(slices)
    return result


def _dense_sums(
    dense: list[Any], weight: Any, counts: list[Any], options: Averaging, *, name: str
) -> tuple[list[Any], Any, list[Any]]:
    """Means or sums of dense gradients, of the weights, and of counts of rows.

    The stop request is summed with them, but not under Adasum, which sums nothing.
    """
    wire = weight.dtype
    if options.op == "adasum":
        sums = [
            comm.reduce(tensor, "adasum", name=f"{name}.{index}")
            for index, tensor in enumerate(dense)
        ]
        return sums, weight * comm.size(), []
    is_mean = options.op == "average"
    stop_request = step_context.current().stop_request
    request = [] if stop_request is None else [stop_request.as_tensor(wire)]
    if options.compression and wire == tf.float32 and dense:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in dense], axis=0)
        vector, total, agreed = comm.sum_compressed(
            flat,
            weight,
            kind=options.compression,
            name=name,
            is_mean=is_mean,
            extra=request[0] if request else 0.0,
        )
        if stop_request is not None:
            stop_request.collect(agreed)
        pieces = tf.split(vector, [tensor.shape.num_elements() for tensor in dense])
        sums = [tf.reshape(p, t.shape) for p, t in zip(pieces, dense, strict=True)]
        return sums, total, comm.sum_tensors(counts, name=f"{name}.counts", dtype=wire)
    weighted = [tensor * weight for tensor in dense] if is_mean else dense
    everything = comm.sum_tensors(
        [*weighted, weight, *request, *counts], name=name, dtype=wire
    )
    sums, total, *everything = everything[: len(dense)], *everything[len(dense) :]
    if stop_request is not None:
        stop_request.collect(everything.pop(0))
    if is_mean:
        sums = [summed / total for summed in sums]
    return sums, total, everything


def _wire_of(gradient: Any) -> Any:
    """The dtype in which a gradient is sent and summed.

    Horovod does not support bfloat16, and float16 is too narrow for a sum.
    """
    return tf.float64 if gradient.dtype == tf.float64 else tf.float32
