"""Which of the user's batches a rank reads at a step, for those who name them."""

from collections.abc import Callable, Sequence

import keras

from keras_dist.data.arrays_order import batches_at
from keras_dist.data.batches_sequence import ShardedSequence
from keras_dist.data.batches_stream import Stream, finite_or_none
from keras_dist.data.feed import RankBatches, ShardSpec


def batch_indices(
    own: RankBatches,
    stream: Stream,
    steps: int | None,
    spec: ShardSpec,
    is_sharded: bool,
    shuffle: bool,
) -> Callable[[int, int], Sequence[int]] | None:
    """A function of an epoch and a step that returns the indices of the batches.

    It is `None` if Keras shuffles the batches, in an order that nobody else knows.
    """
    if isinstance(own.data, ShardedSequence):
        return own.data.batches_at
    if shuffle and isinstance(own.data, keras.utils.PyDataset):
        return None
    length = finite_or_none(stream.length)
    is_divided = stream.division is not None and spec.size > 1
    if is_divided:
        length = own.total

    def batches(epoch: int, step: int) -> Sequence[int]:
        # With `steps_per_epoch` an epoch begins where the epoch before it ended.
        step_of_pass = epoch * (steps or 0) + step
        skipped = own.schedule.skipped_in(epoch) if own.schedule else 0
        if steps and own.length is not None and finite_or_none(own.length):
            step_of_pass %= int(own.length)
        if is_divided and stream.division.by == "rows" and length is not None:
            begin = step_of_pass * spec.size + skipped
            return list(range(begin, min(begin + spec.size, length)))
        total = own.reader.total if length is None and own.reader else length
        return batches_at(
            step_of_pass,
            total=total,
            spec=spec,
            is_sharded=is_sharded or (is_divided and length is not None),
            skipped=skipped,
        )

    return batches
