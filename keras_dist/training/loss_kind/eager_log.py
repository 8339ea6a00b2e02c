"""What the graph of a train step says of its losses, for a step that runs eagerly."""

import contextvars
import dataclasses
from collections.abc import Callable
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf

from keras_dist.optimizer import step_context
from keras_dist.training import generators
from keras_dist.training.loss_kind.graph import num_rows
from keras_dist.training.loss_kind.probe import Undecided


class EagerLog:
    """Whether each loss of a step is a sum, in the order in which the step asks.

    Without a graph, nothing shows how a number was computed. So a step that runs
    eagerly is traced once, in a graph that never runs, and the answers are kept.
    """

    def __init__(self) -> None:
        self._answers: list[bool | str] | None = None
        self._next = 0
        self._is_open = False

    @property
    def is_read(self) -> bool:
        """Whether a step was traced."""
        return self._answers is not None

    def skip(self) -> None:
        """All losses are means: those of Keras alone."""
        self._answers = []

    def read(self, step: Callable[[Any], Any], data: Any) -> None:
        """Trace a step without running it.

        Args:
            step: A train step.
            data: A batch.
        """
        specs = keras.tree.map_structure(_spec, data)
        context = contextvars.copy_context()
        self._answers, self._is_open = [], True
        try:
            with (
                generators.put_back(),
                futures.ThreadPoolExecutor(max_workers=1) as thread,
            ):
                thread.submit(context.run, _trace, step, specs).result()
        except Exception as error:  # a step that cannot be traced runs eagerly
            reason = f"because the step runs eagerly, and tracing it raises {error!r}"
            self._answers = [reason.splitlines()[0]]
        finally:
            self._is_open = False

    def begin_step(self) -> None:
        """The next question is the first one of a step."""
        self._next = 0

    def add(self, has_sums: bool, is_sum: Callable[[], bool]) -> None:
        """Keep an answer, while a step is traced by `read`.

        Args:
            has_sums: Whether a loss has a term that is a sum.
            is_sum: A function that returns whether the whole loss is one.
        """
        if not self._is_open or self._answers is None:
            return
        if has_sums and not is_sum():
            self._answers.append("because the step runs eagerly, and the loss has both")
        else:
            self._answers.append(has_sums)

    def add_undecided(self, error: Undecided) -> None:
        """Keep that there is no answer, while a step is traced by `read`."""
        if self._is_open and self._answers is not None:
            self._answers.append(str(error))

    def is_sum(self) -> bool:
        """The next answer: whether the whole loss is a sum.

        Raises:
            Undecided: If that is not known.
        """
        answers = self._answers or []
        index, self._next = self._next, self._next + 1
        if not answers:
            return False
        answer = answers[index] if index < len(answers) else answers[-1]
        if isinstance(answer, str):
            raise Undecided(answer)
        return answer


def _trace(step: Callable[[Any], Any], specs: Any) -> None:
    def traced(data: Any) -> Any:
        # The number of rows is open in this graph.
        context = dataclasses.replace(
            step_context.current(), rows=num_rows(data), recorded=[]
        )
        with step_context.entered(context):
            return step(data)

    tf.function(traced, autograph=False).get_concrete_function(specs)


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    shape = [None, *leaf.shape[1:]] if len(leaf.shape) else []
    return tf.TensorSpec(shape, leaf.dtype)
