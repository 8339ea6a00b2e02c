"""Data of unknown length: a pass ends when no rank has a batch left."""

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.arrays import RAGGED_OR_SPARSE, is_scipy_sparse
from keras_dist.data.batch_rows import (
    BatchRows,
    batch_of,
    is_number,
    put_beside,
    put_beside_spec,
)
from keras_dist.data.dealer import Dealer
from keras_dist.data.division import ReadContext, no_data
from keras_dist.data.source import Source

# What a rank says before a step, if not the rows of its batch: it has no batch left; it
# had none in this pass.
_END, _EMPTY = -1, -2


class StreamReader:
    """This rank's batches, until no rank has one left: all ranks stop at once.

    If one rank ended earlier, the others would wait for it in the next allreduce. So
    the ranks gather one number before each batch, and a rank that has no batch left
    takes part without rows, by a copy of its last one.

    Args:
        source: The data.
        context: The ranks, and their collective.
        dealer: What this rank reads of the batches.
        limit: Batches of all ranks in a pass; `None` for all that there are.

    Attributes:
        failure: The error that the user's data raised, if any.
    """

    def __init__(
        self,
        source: Source,
        context: ReadContext,
        dealer: Dealer,
        *,
        limit: int | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self._source, self._spec, self._dealer = source, context, dealer
        self._limit = limit
        is_joint = dealer.is_training and context.size > 1
        self._gather = context.gather if is_joint else None

    def dataset(self) -> tf.data.Dataset:
        """Return the batches as a data set; each iterator over it is one pass."""
        # Without reading ahead, all ranks have read as many batches when they stop.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        signature = self._signature()
        if self._gather or self._dealer.is_copy:
            signature = put_beside_spec(signature)
        dataset = tf.data.Dataset.from_generator(
            self._batches, output_signature=signature
        )
        return dataset.with_options(options)

    def _batches(self) -> Iterator[Any]:
        batches, last = self._next_pass(), None
        while True:
            try:
                own = self._next(batches)
                rows = int(own[1].rows) if own else _END if last else _EMPTY
                counted = self._count_rows(rows)
            except Exception as error:  # TensorFlow will wrap it
                self.failure = error
                raise
            if counted is None:
                return
            last = own or last
            assert last is not None  # else `_count_rows` has raised an error
            batch, is_beside = last[0], self._gather or self._dealer.is_copy
            yield put_beside(batch, counted) if is_beside else batch

    def _next_pass(self) -> Iterator[Any]:
        is_local = self._dealer.size == 1
        batches = self._source.next_pass(1 if is_local else self._spec.batches_per_step)
        yield from itertools.islice(batches, self._limit)

    def _next(self, batches: Iterator[Any]) -> tuple[Any, Any] | None:
        """Read this rank's part of the next step; `None` at the end of the data."""
        of_step = list(itertools.islice(batches, self._dealer.per_step))
        as_read = self._source.standardize
        return self._dealer.take(len(of_step), lambda index: as_read(of_step[index]))

    def _count_rows(self, rows: int) -> BatchRows | None:
        """Count the rows of all ranks; `None` if none has a batch left."""
        everyone = [rows] if self._gather is None else self._gather(rows)
        if self._gather is not None and _EMPTY in everyone:
            ranks = [rank for rank, other in enumerate(everyone) if other != _EMPTY]
            raise ValueError(
                "Each rank needs at least one row. Received: data of type "
                f"{self._source.type_name} with batches on ranks {ranks} of "
                f"{len(everyone)} alone. Pass more data, or run on fewer ranks."
            )
        if max(everyone) < 0:
            return None
        counts = [max(0, count) for count in everyone]
        rank = self._spec.rank if self._gather else 0
        return BatchRows(counts[rank], sum(counts[:rank]), sum(counts))

    def _signature(self) -> Any:
        if isinstance(self._source.data, tf.data.Dataset):
            if self._dealer.splits_batches:
                return batch_of(self._dealer.deal(self._source.data).element_spec)
            return self._source.data.element_spec
        looks = [self._source.standardize(batch) for batch in self._source.first(2)]
        if not looks:
            received = f"a {self._source.type_name} without a batch"
            raise no_data(received, is_training=self._dealer.is_training)
        for leaf in keras.tree.flatten(looks):
            is_dense = hasattr(leaf, "shape") and not isinstance(leaf, RAGGED_OR_SPARSE)
            if not is_dense or is_scipy_sparse(leaf):
                raise ValueError(
                    "Batches of an iterator must be dense arrays. Received: a batch "
                    f"with {type(leaf).__name__} from x of type "
                    f"{self._source.type_name}. Pass dense arrays, or a "
                    "keras.utils.PyDataset."
                )
        return keras.tree.map_structure(_find_spec, *looks)


def _find_spec(*leaves: Any) -> tf.TensorSpec:
    """Find shape and dtype of arrays; where lengths differ, any length is allowed."""
    is_tensor = tf.is_tensor(leaves[0])
    dtype = leaves[0].dtype if is_tensor else np.asarray(leaves[0]).dtype
    if is_number(leaves[0]):
        return tf.TensorSpec([], tf.as_dtype(dtype))
    lengths = zip(*(leaf.shape[1:] for leaf in leaves), strict=True)
    inner = [n[0] if len(set(n)) == 1 else None for n in lengths]
    return tf.TensorSpec([None, *inner], tf.as_dtype(dtype))
