"""Reduction operations and compression, by Horovod's names."""

from typing import Any

import tensorflow as tf


class ReduceOp:
    """A way to combine the values of all ranks, such as `Average`.

    Args:
        name: Its name in this package.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name.capitalize()


Average = ReduceOp("average")
Sum = ReduceOp("sum")
Adasum = ReduceOp("adasum")
Min = ReduceOp("min")
Max = ReduceOp("max")
Product = ReduceOp("product")


def chosen(op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """The operation that two arguments of Horovod's functions ask for.

    Args:
        op: An operation, by default `Average`.
        average: Older than `op`: `True` for `Average`, `False` for `Sum`.

    Raises:
        ValueError: If both are given, or `op` is no operation.

    >>> chosen(None), chosen(None, False), chosen(Max)
    (Average, Sum, Max)
    """
    if op is not None and average is not None:
        raise ValueError(
            "`op` replaces `average`: only one of them can be given. "
            f"Received: op={op!r} and average={average!r}. Leave out `average`."
        )
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(
            "`op` must be one of hvd.Average, Sum, Min, Max, Product and Adasum of "
            f"keras_dist.horovod. Received: op={op!r}"
        )
    return op or (Sum if average is False else Average)


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
