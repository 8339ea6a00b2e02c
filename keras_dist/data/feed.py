"""One rank's data for Keras: its batches, their number, and the position in them."""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data.arrays import Arrays
from keras_dist.data.division import Division
from keras_dist.data.sequence import ShardedSequence
from keras_dist.data.source import Source
from keras_dist.data.stream import StreamReader
from keras_dist.plan import Rows

# Stands in TensorFlow's error, and in ours, where a pass has another number of batches
# than the data set's cardinality says.
_WRONG_LENGTH = re.compile(r"expected to contain .* but contained[^\[{]*")


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One rank's data. Arrays, data sets, sequences and streams all become a `Feed`.

    Args:
        data: The batches, in a type that Keras takes.
        length: Batches in a pass of data in batches, `math.inf`, or `None` if unknown,
            and for arrays.
        plan: The plan's lines about its rows and steps.
        arguments: Keyword arguments for `Model.fit` or `Model.evaluate`.
        source: The user's data, to be kept until a pass over it was read; `None` if
            Keras reads it, and may refuse it.
        division: Which rows or batches come at which step; `None` if the data cannot
            be read from the middle of an epoch.
        epoch: Has a method `assign(epoch)`, to be called before each epoch is read;
            `None` if the data is the same in every epoch.
        reader: What reads `data`, if its length is unknown.
        keras_steps: The steps of an evaluation for Keras; `None` where its data ends.
        is_exact: Whether the number of steps in the plan is certain, not an estimate.
        class_weight: Weights of classes that a step adds, because Keras does not know
            data with `BatchRows` beside it; `None` for none.
        facts: Name and value of everything that has to be equal on all ranks.
    """

    data: Any
    length: float | None = None
    plan: Rows = Rows("")
    arguments: dict[str, Any] = field(default_factory=dict)
    source: Arrays | Source | None = None
    division: Division | None = None
    epoch: Any = None
    reader: StreamReader | None = None
    keras_steps: int | None = None
    is_exact: bool = True
    class_weight: dict[int, float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_dealt(self) -> bool:
        """True if the ranks evaluate whole batches in turn, rank r of N r, r + N, …."""
        is_replicated = getattr(self.source, "is_replicated", False)
        return is_replicated or isinstance(self.source, Arrays)

    def position_facts(self) -> dict[str, Any]:
        """Return what a position in the middle of this epoch depends on."""
        if self.division is None:
            return {}
        is_sequence = isinstance(self.data, ShardedSequence)
        order = {"order": self.data.order} if is_sequence else {}
        return self.division.facts() | order

    def add_class_weights(self, batch: Any) -> Any:
        """Add the weight of each row's class to a batch `(x, y)`, as Keras does.

        Raises:
            ValueError: If there are weights of rows already, or several targets.
        """
        if not self.class_weight:
            return batch
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise ValueError(
                "You cannot `class_weight` and `sample_weight` at the same time. "
                f"Received: class_weight={self.class_weight} and rows with weights of "
                "their own. Multiply these by the weights of the classes instead."
            )
        if y is None or keras.tree.is_nested(y):
            raise ValueError(
                "`class_weight` is only supported for Models with a single output. "
                f"Received: class_weight={self.class_weight} and targets of type "
                f"{type(y).__name__}. Pass the weights of the rows as `sample_weight`."
            )
        is_dataset = isinstance(self.source, Source) and self.source.kind == "dataset"
        dtype = "float32" if is_dataset else keras.config.floatx()
        classes = tf.cast(y, "float64")
        if classes.shape.rank > 1:
            is_one_hot = classes.shape[-1] != 1
            find_class: Any = tf.argmax if is_one_hot else tf.squeeze
            classes = find_class(classes, axis=-1)
        classes = tf.cast(tf.round(classes), tf.int64)[..., None]
        # Keras looks up integers, to which keys such as 1.0 are equal.
        given = {int(k): w for k, w in self.class_weight.items() if k % 1 == 0}
        is_class = tf.equal(classes, tf.constant(list(given), tf.int64))
        weights = tf.constant(list(given.values()), dtype)
        weights = tf.reduce_sum(tf.where(is_class, weights, 0), axis=-1)
        return x, y, tf.where(tf.reduce_any(is_class, axis=-1), weights, 1)


@contextlib.contextmanager
def raise_own_errors(feeds: Sequence[Feed]) -> Iterator[None]:
    """Context manager that raises the error that the user's data raised.

    TensorFlow reads the data in a thread and wraps an error of the user's generator in
    a long error of its own: here the original error is raised. Keras warns when data
    ends before the expected number of steps: the warning is hidden if that number was
    an estimate.
    """
    with warnings.catch_warnings():
        if not all(feed.is_exact for feed in feeds):
            warnings.filterwarnings("ignore", "Your input ran out of data")
        try:
            yield
        except tf.errors.OpError as error:
            readers = [feed.reader for feed in feeds if feed.reader is not None]
            for failure in (reader.failure for reader in readers):
                if failure is not None:
                    raise failure from None
            found = _WRONG_LENGTH.search(error.message)
            if not found:
                raise
            raise RuntimeError(
                "A pass over the data gave another number of batches than the data "
                f"set's cardinality says. Received: a pass {found[0].strip(' .')}. A "
                "cache that was filled by an iterator that stopped midway has too few "
                "batches; so has a data set with a wrong `assert_cardinality`. Create "
                "the data set again, and pass the new one."
            ) from None
