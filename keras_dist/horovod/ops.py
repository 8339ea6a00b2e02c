"""Reduction operations and compression, by Horovod's names."""

import enum
from typing import Any, TypeAlias

import tensorflow as tf


class ReduceOp(enum.IntEnum):
    """A way to combine the values of all ranks, with Horovod's number of it."""

    average = 0
    sum = 1
    adasum = 2
    min = 3
    max = 4
    product = 5

    def __repr__(self) -> str:
        return self.name.capitalize()


Average = ReduceOp.average
Sum = ReduceOp.sum
Adasum = ReduceOp.adasum
Min = ReduceOp.min
Max = ReduceOp.max
Product = ReduceOp.product


def chosen(op: int | None, average: bool | None = None) -> ReduceOp:
    """Return the operation that two arguments of Horovod's functions ask for.

    Args:
        op: An operation or its number, by default `Average`.
        average: Older than `op`: `True` for `Average`, `False` for `Sum`.

    Raises:
        ValueError: If both are given, or `op` is no operation.

    >>> chosen(None), chosen(None, False), chosen(Max), chosen(3)
    (Average, Sum, Max, Min)
    """
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise ValueError(
            "`op` replaces `average`: only one of them can be given. "
            f"Received: op={op!r} and average={average!r}. Leave out `average`."
        )
    # True is 1, and would be Sum.
    if isinstance(op, bool) or op not in list(ReduceOp):
        raise ValueError(
            "`op` must be one of hvd.Average, Sum, Adasum, Min, Max and Product, or "
            f"its number from 0 to 5. Received: op={op!r}"
        )
    return ReduceOp(op)


class NoneCompressor:
    """Numbers are sent as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress`."""
        return tensor


class FP16Compressor:
    """Floats are sent in two bytes each."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16 if it is of floats, and its dtype."""
        tensor = tf.convert_to_tensor(tensor)
        is_float = tensor.dtype.is_floating
        return (tf.cast(tensor, tf.float16) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress`, but for the rounding."""
        return tf.cast(tensor, ctx)


class Compression:
    """How gradients are sent: `Compression.none` or `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor


# What gradients can be compressed by.
Compressor: TypeAlias = type[NoneCompressor] | type[FP16Compressor]
