"""Terms of a loss that are no means, and the log of them for steps that run eagerly."""

import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.data import preserve_generators
from keras_dist.optimizer import step_context
from keras_dist.training.loss_kind.probe import (
    Kind,
    Probe,
    RowGraph,
    Undecided,
    num_rows,
)

# Operations that do not change a scalar's value.
_UNCHANGED = {"Identity", "Snapshot", "CheckNumerics", "Cast", "EnsureShape"}
_UNCHANGED |= {"Reshape", "Squeeze", "ExpandDims", "Sum", "Mean"}


@dataclass(frozen=True)
class Term:
    """A term of a scalar, `coefficient × value`, that is no mean over rows.

    Args:
        value: A scalar tensor: a sum over the rows of this rank; with a `divisor`, such
            a sum divided by it.
        coefficient: A number or a scalar tensor without rows.
        divisor: Another sum over the rows of this rank, such as the number of unmasked
            elements, or computed from such sums; `None`: there is none.
        probe: Tries what `divisor` is computed from; `None`: it is a sum.
        dividend: What is divided, a sum or a mean over the rows of this rank.
    """

    value: Any
    coefficient: Any = 1.0
    divisor: Any = None
    probe: Probe | None = None
    dividend: Kind = Kind.SUM

    def change(self, fraction: Any) -> Any:
        """Compute what to add to `coefficient`, so that the weighted mean is the whole.

        Args:
            fraction: This rank's fraction of the rows; a scalar tensor.
        """
        fraction = tf.cast(fraction, tf.float64)
        factor = tf.math.divide_no_nan(self._part_of_all(fraction), fraction)
        factor -= 1
        return tf.cast(self.coefficient, tf.float64) * factor

    def _part_of_all(self, fraction: Any) -> Any:
        if self.divisor is None:
            return tf.ones((), tf.float64)
        total = of_all_ranks(lambda: fraction)
        if self.probe is None:
            whole = total(self.divisor, Kind.SUM)
        else:
            whole = self.probe.of_all(self.divisor, total)
        own = step_context.current().counted(tf.cast(self.divisor, tf.float64))
        if self.dividend is Kind.MEAN:
            own *= fraction
        return tf.math.divide_no_nan(own, tf.cast(whole, tf.float64))


def of_all_ranks(fraction: Callable[[], Any]) -> Callable[[Any, Kind], Any]:
    """Return a function of a scalar and its kind, which is that of all ranks.

    Args:
        fraction: Returns this rank's fraction of the rows, a scalar tensor; it may need
            a collective.
    """

    def total(scalar: Any, kind: Kind) -> Any:
        own = step_context.current().counted(tf.cast(scalar, tf.float64))
        if kind is Kind.MEAN:
            own *= fraction()
        return comm.total(own, purpose="losses")

    return total


def terms_of(value: Any, probe: Probe, *, sources: Sequence[Any] = ()) -> list[Term]:
    """Return the terms of a scalar that are no means over rows.

    Args:
        value: A scalar tensor of a graph.
        probe: Tries scalars of that graph.
        sources: Variables by which `value` is differentiated: coefficients and divisors
            may not depend on them.

    Returns:
        Nothing if `value` is a mean over rows, or does not depend on them.

    Raises:
        Undecided: If a term is neither a mean nor a sum.
    """
    graph = probe.graph
    terms, todo = [], [(value, 1.0)]
    while todo:
        tensor, coefficient = todo.pop()
        if step_context.known_as(tensor) or not graph.depends_on_rows(tensor):
            continue
        inner = _linear(tensor, graph, probe, sources)
        if inner is not None:
            todo += [(t, _product(coefficient, factor)) for t, factor in inner]
            continue
        kind = probe.kind_of(tensor)
        if kind is Kind.SUM:
            terms.append(Term(tensor, coefficient))
        elif kind is Kind.OTHER:
            terms.append(_quotient(tensor, coefficient, probe, sources))
    return terms


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, float) and isinstance(other, float):
        return one * other
    return tf.cast(one, tf.float64) * tf.cast(other, tf.float64)


def _linear(
    tensor: Any, graph: RowGraph, probe: Probe, sources: Sequence[Any]
) -> list[tuple[Any, Any]] | None:
    """Split `tensor` into scalars that add up to it, each with its factor."""
    op = tensor.op
    inputs = list(op.inputs)
    if op.type in ("Sum", "Mean") and inputs[0].op.type == "Pack":
        scalars = list(inputs[0].op.inputs)
        factor = 1.0 if op.type == "Sum" else 1 / len(scalars)
        found = [(part, factor) for part in scalars]
    elif op.type in _UNCHANGED and not _is_widened(op):
        found = [(inputs[0], 1.0)]
    elif op.type in ("Add", "AddV2", "AddN"):
        found = [(part, 1.0) for part in inputs]
    elif op.type == "Sub":
        found = [(inputs[0], 1.0), (inputs[1], -1.0)]
    elif op.type == "Neg":
        found = [(inputs[0], -1.0)]
    else:
        found = list(_scaled(op, graph, probe, sources))
    is_scalar = all(part.shape.rank == 0 for part, _ in found)
    return found if found and tensor.shape.rank == 0 and is_scalar else None


def _is_widened(op: Any) -> bool:
    """Tell whether a number of few bits becomes one of more bits."""
    return op.type == "Cast" and op.inputs[0].dtype.size < op.outputs[0].dtype.size


def _scaled(
    op: Any, graph: RowGraph, probe: Probe, sources: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """Find the input of a product or quotient whose other input has no rows."""
    if op.type not in ("Mul", "RealDiv", "DivNoNan") or probe.counts_rows(op):
        return
    one, other = op.inputs
    if op.type == "Mul" and not graph.depends_on_rows(one):
        one, other = other, one
    if not graph.depends_on_rows(other) and not graph.depends_on(other, sources):
        yield one, other if op.type == "Mul" else 1 / tf.cast(other, tf.float64)


def _quotient(
    tensor: Any, coefficient: Any, probe: Probe, sources: Sequence[Any]
) -> Term:
    """Return the term of a scalar that is divided by a number of this rank's rows."""
    op = tensor.op
    term = None
    if op.type in ("RealDiv", "DivNoNan"):
        above, below = op.inputs
        kind = probe.kind_of(above)
        if kind is not Kind.OTHER:
            probe.of_all(below, None, sources)
            term = Term(tensor, coefficient, below, probe, kind)
    elif op.type == "Mean" and op.inputs[0].shape.rank is not None:
        # Of rows that were selected.
        term = Term(tensor, coefficient, tf.shape(op.inputs[0])[0])
    if term is None:
        raise Undecided(f"because of {op.type} of {tensor.dtype.name}")
    if probe.graph.depends_on(term.divisor, sources):
        reason = f"because of {term.divisor.op.type}, a divisor with a gradient"
        raise Undecided(reason)
    return term


class EagerLog:
    """Whether each loss of a step is a sum, in the order in which the step asks.

    Without a graph, nothing shows how a number was computed. So a step that runs
    eagerly is traced once, in a graph that never runs, and the answers are kept. Beside
    them it keeps which warnings were given.
    """

    def __init__(self) -> None:
        self._answers: list[bool | str] | None = None
        self._next = 0
        self._is_open = False
        self._has_divided_weights = False
        self._warned: set[str] = set()

    @property
    def is_read(self) -> bool:
        """True if a step was traced."""
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
                preserve_generators(),
                futures.ThreadPoolExecutor(max_workers=1) as thread,
            ):
                thread.submit(context.run, _trace, step, specs).result()
        except Exception as error:  # a step that cannot be traced runs eagerly
            reason = f"because the step runs eagerly, and tracing it raises {error!r}"
            self._answers = [reason.splitlines()[0]]
        finally:
            self._is_open = False

    def begin_step(self) -> None:
        """Expect the first question of a step next."""
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

    def is_new(self, warning: str) -> bool:
        """Tell whether a warning is given for the first time in this fit."""
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new

    def add_divided_weights(self) -> None:
        """Keep that weights are divided by a number of the rows, in such a trace."""
        self._has_divided_weights |= self._is_open

    def check_weights(self) -> None:
        """Check weights of which no graph tells what they were divided by.

        Raises:
            Undecided: If some are divided by a number of this rank's rows.
        """
        if self._has_divided_weights:
            raise Undecided(
                "because of weights that are divided by a number of the rows, in a "
                "step that runs eagerly"
            )

    def is_sum(self) -> bool:
        """Tell by the next answer whether the whole loss is a sum.

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
