"""What a train step passes to `Optimizer.apply` through Keras's code."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import tensorflow as tf

from keras_dist import comm, mixin

# A place in a step where a number or gradients pass: what it is ("loss", "compute",
# "tracker", "apply"), and how many of these came before; or "log" and its path there.
StepPlace = tuple[str, Any]


@dataclass(frozen=True)
class LossKinds:
    """What the trial of a step found out; by default, everything is a mean over rows.

    Args:
        sums: Places of sums over rows.
        gathered: Losses of `compile` that are computed from the rows of all ranks.
        in_blocks: Whether draws of several numbers a row begin with one for each row.
    """

    sums: frozenset[StepPlace] = frozenset()
    gathered: frozenset[StepPlace] = frozenset()
    in_blocks: bool = False


class Request(IntEnum):
    """What a rank requests of all ranks; what they do is the largest of their requests.

    A stop comes before an end of all processes: it ends the epoch, which saves.
    """

    NOTHING = 0
    SAVE = 1  # a checkpoint after this step
    END = 2  # also the process
    STOP = 3  # the training


class Requests:
    """The request of this rank, and that on which all ranks act after the same step.

    If one rank left Keras's loop first, the others would wait for it in the next
    allreduce. So the requests of all ranks come with the gradients of each update, and
    at the end of an epoch they are gathered.

    Attributes:
        asked: What this rank requests; `own` is a variable of its number.
        is_alone: Whether this rank stops by itself: on one rank, or without an
            agreement at the end of an epoch (`StopTogether`).
        is_shown: Whether the user's callbacks run, which read what they have set.
    """

    def __init__(self) -> None:
        # On the CPU, since it is read after each batch. Keras does not save it.
        with tf.init_scope(), tf.device("CPU:0"):
            self.own, self._agreed = (tf.Variable(0, trainable=False) for _ in "12")
        self.is_alone, self.is_shown = True, False
        self.reset()

    def reset(self) -> None:
        """Begin a fit: nothing is requested."""
        self.ask(Request.NOTHING)
        self._agreed.assign(Request.NOTHING)

    def ask(self, request: Request) -> None:
        """Set what this rank requests; it is sent with the next update."""
        self.asked = request
        with tf.init_scope():
            self.own.assign(request)

    def collect(self, by_rank: Any) -> None:
        """Store what all ranks do, from the numbers of all, in an update of all."""
        # One call may make several steps.
        self._agreed.assign(tf.reduce_max([self._agreed, tf.reduce_max(by_rank)]))

    def agree(self, is_stop: bool) -> None:
        """Let the training stop, or go on: what all ranks have decided on."""
        self._agreed.assign(Request.STOP if is_stop else Request.NOTHING)

    def is_stop(self) -> bool:
        """Return True if the training stops; for Keras's loop, on all ranks."""
        is_own = (self.is_alone or self.is_shown) and self.asked == Request.STOP
        is_agreed = tf.executing_eagerly() and int(self._agreed) == Request.STOP
        return is_own or is_agreed

    def take(self) -> Request:
        """Return what all ranks do after this step beside a stop, and drop it."""
        agreed = Request(int(self._agreed))
        if agreed not in (Request.SAVE, Request.END):
            return Request.NOTHING
        self._agreed.assign(Request.NOTHING)
        return agreed


@dataclass(frozen=True)
class StepContext:
    """Facts about the train step that is being traced or run.

    Keras calls `Optimizer.apply` with gradients and variables only, and a user's own
    `train_step` may be in between. So the step enters one of these, and `apply` gets it
    from `current()`. With the defaults, all ranks have the same weight.

    Args:
        rows: Rows of this rank's batch that count, over which its loss is a mean; a
            number or a scalar tensor, 0 for a copy. `None` if unknown.
        length: Rows of the batch, also if it is a copy.
        begin: Index of the first one in the global batch, if known.
        step: Number of the step, a scalar tensor; `None` if unknown.
        rows_of_all: Rows of the batches of all ranks, if known without a collective.
        global_rows: Rows of all ranks in the first step, a number that all ranks agree
            on; `None` if unknown.
        shares_batch: Whether the ranks have rows of one batch: other axes are equal.
        is_compiled: Whether XLA compiles this part of the step, so that no collective
            can be in it.
        is_keras_path: Whether Keras's own code alone computes the update from the loss:
            all gradients come from the loss that was given to `scale_loss`.
        requests: This rank's request, which is sent with the gradients.
        draw_common_numbers: Context manager for the update, in which all ranks draw the
            same random numbers.
        recorded: A list to which `apply` adds its calls, without running them.
        is_averaged: Whether the gradients given to `apply` are averaged already.
        weighted: States of the optimizers whose loss is multiplied by this rank's
            fraction of the rows.
        kinds: Which losses, logged numbers and gradients are sums over rows.
        trial: The run of a trial (`training.trial.TrialRun`), which communicates
            nothing; `None` in a real step.
        passed: How many numbers and gradients have passed, of each kind.
        fractions: This rank's fraction of the rows, by graph.
        weight_of_all: In a loss that is computed from the rows of all ranks: the weight
            of what this rank updates a `Mean` with, as all ranks do; 0.0 for nothing.
    """

    rows: Any = None
    length: Any = None
    begin: Any = None
    step: Any = None
    rows_of_all: Any = None
    global_rows: int | None = None
    shares_batch: bool = False
    is_compiled: bool = False
    is_keras_path: bool = False
    requests: Requests | None = None
    draw_common_numbers: Callable[[], contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext
    )
    recorded: list[Any] | None = None
    is_averaged: bool = False
    weighted: list[Any] = field(default_factory=list)
    kinds: LossKinds = LossKinds()
    trial: Any = None
    passed: dict[str, int] = field(default_factory=dict)
    fractions: dict[Any, Any] = field(default_factory=dict)
    weight_of_all: Any = None

    @property
    def has_rows(self) -> Any:
        """Whether a row counts: a boolean scalar; `None` if one always does."""
        return self.rows > 0 if tf.is_tensor(self.rows) else None

    def row_fraction(self, dtype: Any) -> Any:
        """This rank's rows divided by the rows of all ranks; a scalar tensor.

        If the rows of all ranks are unknown, they are summed by a collective, once in
        each graph.
        """
        if self.rows is None:
            return tf.constant(1 / comm.size(), dtype)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph not in self.fractions:
            rows = tf.cast(self.rows, tf.float64)
            total = self.rows_of_all
            if total is None:
                total = self.total(rows, purpose="rows")
            self.fractions[graph] = rows / tf.cast(total, tf.float64)
        return tf.cast(self.fractions[graph], dtype)

    def inverse_fraction(self, dtype: Any) -> Any:
        """1 / `row_fraction`; 0 for a rank that has no rows."""
        fraction = self.row_fraction(tf.float64)
        return tf.cast(tf.math.divide_no_nan(tf.ones_like(fraction), fraction), dtype)

    def total(self, value: Any, *, purpose: str) -> Any:
        """Sum a tensor over all ranks, as `comm.total`; in a trial, over all parts."""
        if self.trial is not None:
            return self.trial.take_from_whole(value)
        return comm.total(value, purpose=purpose)

    def next_place(self, level: str) -> StepPlace:
        """Return the place of the number, or the gradients, that pass now."""
        index = self.passed.get(level, 0)
        self.passed[level] = index + 1
        return level, index

    def is_sum_next(self, level: str) -> bool:
        """Return True if what passes next is a sum over rows."""
        return (level, self.passed.get(level, 0)) in self.kinds.sums

    def count_own(self, value: Any) -> Any:
        """Return a number; 0 if this rank's batch is a copy of another rank's."""
        if self.has_rows is None:
            return value
        return value * tf.cast(self.has_rows, value.dtype)


# Set around each train step; read in `apply` while the step is traced or run.
_current: ContextVar[StepContext | None] = ContextVar("step_context", default=None)


def current() -> StepContext:
    """Return the context of the train step around this call, or the default."""
    return _current.get() or StepContext()


def is_inside() -> bool:
    """Return True inside of a step of training or evaluation."""
    return _current.get() is not None


@contextlib.contextmanager
def enter(context: StepContext) -> Iterator[StepContext]:
    """Context manager in which `current()` is `context`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


# Autograph outside of Keras's train step, which turns it off for what it calls.
_AUTOGRAPH = tf.__internal__.autograph.control_status_ctx()


def run_inline() -> contextlib.AbstractContextManager[None]:
    """Context manager in which a `tf.function` of the user's is part of the step.

    It keeps its traces, and would use that of another step: of a trial, where `apply`
    averages nothing, or of the last fit, whose numbers of rows are out of scope.
    """

    def run(plain: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(function.python_function, "__module__", None) or ""
        if module.partition(".")[0] in ("tensorflow", "keras_dist"):
            return plain(*args, **kwargs)  # nor what XLA compiles of the step
        inline = tf.__internal__.autograph.tf_convert(
            function.python_function, _AUTOGRAPH, user_requested=True
        )
        return inline(*args, **kwargs)

    return mixin.replace_method(type(tf.function(run)), "__call__", run)
