"""What becomes of the batches that are left over: fewer than ranks, at a pass's end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.batches_stream import Stream

if TYPE_CHECKING:
    from keras_dist.data.feed import ShardSpec

# In the plan, by rule.
_IN_WORDS = {
    "cut": "cut by rows",
    "whole": "whole to some ranks, the others make a step without rows",
    "drop": "left out",
    "either": "cut by rows, or whole where their tensors differ in length",
}


def rule_of(stream: Stream, spec: "ShardSpec", name: str) -> str:
    """What becomes of the batches of a stream that are left over.

    A batch can be cut where all its tensors have one length, which is open. Where it is
    a constant, a train step may use it (noise of shape `(batch_size, …)`); where
    tensors have different lengths, as in a batch that is one graph, the first axis does
    not count rows, and it may not in a single array of a sequence. And where each rank
    has another batch left over, one might have rows for all ranks, and another one too
    few: they would make different steps.

    Args:
        stream: The data.
        spec: How it is divided.
        name: "training" or "validation".

    Returns:
        "cut", "whole" or "drop" as of `ShardSpec`; "either": cut or whole, as it shows
        when they are read.
    """
    if name in spec.unordered and spec.leftover != "drop":
        return "whole" if spec.can_mark else "drop"
    if spec.leftover != "auto":
        return spec.leftover
    if isinstance(stream.data, tf.data.Dataset):
        lengths = lengths_of_spec(stream.data.element_spec)
        if any(length is not None for length in lengths):
            return "whole" if spec.can_mark else "cut"
        if len(lengths) < 2:
            return "cut"
        if stream.has_seeded_passes:  # nothing of it was read
            return "either" if spec.can_mark else "cut"
    if stream.length and stream.length % spec.size == 0 and spec.position is None:
        return "cut"  # none are left over
    shapes = stream.shapes_of_first()
    if not _are_even(shapes):
        return "whole" if spec.can_mark else "drop"
    # Of arrays without targets, nothing says that their first axis is one of rows.
    is_alone = len(shapes) == 1 and not isinstance(stream.data, tf.data.Dataset)
    return "whole" if is_alone and spec.can_mark else "cut"


def in_words(rule: str, count: int | None) -> str:
    """What the plan says of batches that are left over.

    Args:
        rule: What `rule_of` returns.
        count: How many they are; `None` if unknown.
    """
    if count == 0:
        return ""
    batches = {None: "the last batches", 1: "1 batch"}.get(count, f"{count} batches")
    return f"{batches}: {_IN_WORDS[rule]}"


def lengths_of_spec(element_spec: Any) -> list[int | None]:
    """The lengths of the first axes, `None` for those that are open, 0 for none.

    >>> lengths_of_spec(tf.data.Dataset.range(8).batch(4).element_spec)
    [None]
    """
    return [
        None if spec.shape.rank is None else spec.shape[0] if spec.shape.rank else 0
        for spec in tf.nest.flatten(element_spec)
        if hasattr(spec, "shape")
    ]


def is_even(batch: Any) -> bool:
    """Whether all tensors of a batch have the same length.

    >>> is_even((np.zeros((3, 2)), np.zeros(3))), is_even((np.zeros(3), np.zeros(2)))
    (True, False)
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return _are_even([leaf.shape for leaf in leaves])


def _are_even(shapes: Sequence[Sequence[Any]]) -> bool:
    return all(map(len, shapes)) and len({shape[0] for shape in shapes}) <= 1


def are_even(batches: tf.data.Dataset) -> tf.Tensor:
    """The same of all batches of a data set, as a tensor."""

    @tf.autograph.experimental.do_not_convert
    def is_whole(*batch: Any) -> tf.Tensor:
        lengths = tf.stack(
            [
                tf.cast(leaf.nrows(), tf.int64)
                if isinstance(leaf, tf.RaggedTensor)
                else tf.shape(leaf, tf.int64)[0]
                for leaf in tf.nest.flatten(batch)
            ]
        )
        return tf.reduce_all(tf.equal(lengths, lengths[0]))

    return batches.map(is_whole).reduce(True, tf.logical_and)


def marked(batch: Any, has_rows: Any) -> tuple[Any, Any]:
    """A batch, and whether its rows count: a number in an array of one.

    A rank that has no batch in a step that others make gets a copy of another rank's.
    """
    if tf.is_tensor(has_rows):
        return batch, tf.cast(tf.reshape(has_rows, [1]), tf.int32)
    return batch, np.array([has_rows], "int32")


def own_index(rank: int, count: int) -> int:
    """Which of `count` batches that are left over a rank has, perhaps as a copy.

    >>> [own_index(rank, 2) for rank in range(4)]
    [0, 1, 1, 1]
    """
    return min(rank, count - 1)


def whole_batches(batches: Sequence[Any], rank: int, *, is_training: bool) -> list[Any]:
    """The batch that a rank has of some that are left over, marked in training."""
    if not is_training:
        return list(batches[rank : rank + 1])
    return [marked(batches[own_index(rank, len(batches))], rank < len(batches))]
