"""Random numbers of a step: those of one process, of which each rank draws its rows.

TensorFlow's stateless generators are counters: number i depends on the seed and on i
alone. All ranks have the same states of their generators, and where the first axis of a
draw is the rows of the batch, a rank skips the numbers of the rows before its own. It
draws as many as without that.
"""

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.data.draws import preserve_generators
from keras_dist.optimizer import step_context

# TensorFlow's functions that draw number i from the counter's place i.
_COUNTED = ("stateless_random_uniform_v2", "stateless_random_normal_v2")

# Those that reject some: all ranks draw the numbers of all rows, and take their own.
_OTHERS = (
    "stateless_truncated_normal_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
)

# Of more numbers for the rows of all ranks, each rank draws its own: its operations
# have this in their names.
_MOST_NUMBERS, _APART = 2**24, "draw_apart"

# Types of operations of which each rank draws its own numbers.
_OWN = re.compile(
    r"(?:Random|Truncated|Parameterized|StatefulRandom|StatefulStandard|StatefulTrunc"
    r"|StatefulUniform|Multinomial|StatelessMultinomial)"
)

# Places of the counter that TensorFlow's kernel of gamma numbers has for each of them.
_GAMMA_PLACES = 256


class StepNoise:
    """Numbers that functions without a seed draw in the steps of one model.

    Functions of `keras.random` draw those of one process. `tf.random` would draw the
    same on all ranks, after `keras.utils.set_random_seed`, for other rows: there each
    rank draws its own. An update draws alike on all ranks: it changes weights.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._shared_seed: int | None = None
        # A step in which one is made would be traced once more.
        self._generator: Any = keras.random.SeedGenerator(0)
        self._begun: Any = None  # its state as the fit began
        self._replaced: Any = None  # the generator of Keras
        self.own_draws: list[str] = []

    def prepare(self, model: Any, undo: contextlib.ExitStack) -> None:
        """Begin a fit, unless it has begun. All ranks call this.

        Args:
            model: The model, with its weights.
            undo: Is closed when the fit is over.
        """
        if self._seed is None:
            self._seed = _derive_seed(model)
        if self._begun is None:
            first = comm.broadcast((private.global_seed(), _next_keras_state()))
            self._shared_seed, self._begun = first
            self._generator.state.assign(self._begun)
            state = private.keras_state()
            # Callbacks and evaluations, too, draw from it, as on one process.
            self._replaced = state.get(private.SEED_GENERATOR)
            state[private.SEED_GENERATOR] = self._generator
            undo.callback(self._finish)

    def _finish(self) -> None:
        """Let `keras.random` go on as after a fit on one process."""
        state, has_drawn = private.keras_state(), self._has_drawn()
        is_ours = state.get(private.SEED_GENERATOR) is self._generator
        if is_ours:  # the user has set no other one
            state[private.SEED_GENERATOR] = self._replaced
            if has_drawn and self._replaced is None:
                random.randint(1, int(1e9))  # as Keras, which draws a seed
            if has_drawn:
                set_keras_state(comm.to_array(self._generator.state))
        self._begun = self._replaced = None

    def _has_drawn(self) -> bool:
        now = comm.to_array(self._generator.state)
        return self._begun is not None and any(now != self._begun)

    def read_state(self) -> Any:
        """Return the state from which functions without a seed draw next, or `None`."""
        generator = private.keras_state().get(private.SEED_GENERATOR)
        if self._begun is not None and not self._has_drawn():
            generator = self._replaced  # nothing has drawn from ours
        return None if generator is None else comm.to_array(generator.state)

    def list_states(self) -> list[Any]:
        """List the states from which functions without a seed may draw."""
        keras_own = private.keras_state().get(private.SEED_GENERATOR)
        every: tuple[Any, ...] = self._generator, self._replaced, keras_own
        return [g.state for g in every if g is not None]

    def draw_batch_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which an evaluation's batch is traced, or run eagerly."""
        return _draw_from(self._generator, lambda seed: seed)

    @contextlib.contextmanager
    def draw_step_numbers(self) -> Iterator[None]:
        """Context manager in which a step is traced, or runs eagerly.

        What a graph draws otherwise than one process is in `own_draws` then.
        """
        own, graph = self._seed, tf.compat.v1.get_default_graph()
        assert own is not None  # `prepare` was called before the first step
        before = 0 if tf.executing_eagerly() else len(graph.get_operations())
        with draw_rows(self._generator, lambda seed: (seed + own) % 2**31):
            yield
        if not tf.executing_eagerly():
            operations = graph.get_operations()[before:]
            own_draws = {o.type for o in operations if f"{_APART}/Stateless" in o.name}
            types = {operation.type for operation in operations}
            self.own_draws = sorted({*own_draws, *filter(_OWN.match, types)})

    @contextlib.contextmanager
    def draw_common_numbers(self) -> Iterator[None]:
        """Context manager in such a step for its update, which has no rows."""
        without_rows = replace(step_context.current(), length=None)
        draw = _draw_from(self._generator, lambda _: self._shared_seed)
        with step_context.enter(without_rows), draw:
            yield


@contextlib.contextmanager
def draw_rows(generator: Any, change: Callable[[int], int | None]) -> Iterator[None]:
    """Context manager in which a step draws its rows of the numbers of all rows.

    Args:
        generator: The `SeedGenerator` for functions of `keras.random` without a seed.
        change: Changes the seed of operations of `tf.random`.
    """
    draws: dict[str, Any] = dict.fromkeys(_COUNTED, _skip_rows)
    draws |= dict.fromkeys(_OTHERS, _take_rows)
    draws["stateless_random_gamma_v3"] = _draw_gamma
    draws["stateless_random_binomial"] = _draw_binomial
    draws["stateless_multinomial"] = _choose_apart
    with contextlib.ExitStack() as stack:
        for name, draw in draws.items():
            operations = private.random_operations(name)
            stack.enter_context(mixin.replace_method(operations, name, draw))
        stack.enter_context(_draw_from(generator, change))
        yield


@contextlib.contextmanager
def _draw_from(generator: Any, change: Callable[[int], int | None]) -> Iterator[None]:
    state = private.keras_state()
    before = state.get(private.SEED_GENERATOR)
    state[private.SEED_GENERATOR] = generator
    try:
        with private.change_operation_seed(change):
            yield
    finally:
        state[private.SEED_GENERATOR] = before


def set_keras_state(value: Any) -> None:
    """Set from where functions of `keras.random` without a seed draw, in a fit, too.

    In a fit on several ranks, before `StepNoise.prepare`.
    """
    state = private.keras_state()
    if state.get(private.SEED_GENERATOR) is None:
        state[private.SEED_GENERATOR] = keras.random.SeedGenerator(0)
    state[private.SEED_GENERATOR].state.assign(value)


def _next_keras_state() -> Any:
    """Return the state from which `keras.random` draws next, without drawing."""
    generator = private.keras_state().get(private.SEED_GENERATOR)
    if generator is not None:
        return comm.to_array(generator.state)
    with preserve_generators():
        return [random.randint(1, int(1e9)), 0]  # as Keras seeds the generator


def _derive_seed(model: Any) -> int:
    """Return another seed for each model and each rank, without drawing it.

    So the script later draws the same random numbers as on one process.
    """
    seed = private.global_seed()
    first = [keras.ops.ravel(v)[:1].numpy().tolist() for v in model.trainable_variables]
    given = random.getstate() if seed is None else seed
    return random.Random(repr((given, first, comm.rank()))).getrandbits(31)


def _skip_rows(plain: Any, shape: Any, **arguments: Any) -> Any:
    """Draw this rank's rows, from the counter's place where they begin."""
    found = _find_rows(shape)
    if found is None or "counter" not in arguments:
        return plain(shape, **arguments)
    if "normal" in plain.__name__ and private.is_compiled_by_xla():
        return _take_rows(plain, shape, **arguments)  # XLA pairs the halves of a draw
    shape, begin, _, times = found
    # Philox makes 128 bits at each place of the counter.
    group = 2 if tf.as_dtype(arguments.get("dtype", tf.float32)).size == 8 else 4
    first = begin * times * tf.reduce_prod(shape[1:])
    steps = tf.cast(tf.stack([first // group, tf.zeros_like(first)]), tf.uint64)
    count = tf.reduce_prod(shape)
    arguments["counter"] += steps
    numbers = plain(tf.reshape(count + group - 1, [1]), **arguments)
    return tf.reshape(tf.slice(numbers, [first % group], [count]), shape)


def _take_rows(plain: Any, shape: Any, **arguments: Any) -> Any:
    """Draw the rows of all ranks, and take this rank's."""
    found = _find_rows(shape)
    if found is None:
        return plain(shape, **arguments)
    static = tf.get_static_value(tf.convert_to_tensor(shape), partial=True)
    sizes = () if static is None else static[1:]
    row_size = math.prod(size or 1 for size in sizes)
    if (step_context.current().global_rows or 0) * row_size > _MOST_NUMBERS:
        name = "seed" if "seed" in arguments else "counter"
        with tf.name_scope(_APART):
            arguments[name] = _separate(shape, arguments[name])
            return plain(shape, **arguments)
    shape, begin, total, times = found
    rows = shape[:1]
    every = tf.where(times > 0, total * times, rows)
    whole = plain(tf.concat([every, shape[1:]], 0), **arguments)
    return tf.reshape(tf.gather(whole, begin * times + tf.range(rows[0])), shape)


def _draw_gamma(plain: Any, shape: Any, *, alpha: Any, **arguments: Any) -> Any:
    """Draw this rank's rows: number i has its own places of the counter."""
    found = _find_rows(shape)
    if found is None or alpha.shape.rank < found[0].shape[0]:  # `alpha` has no rows
        return _take_rows(plain, shape, alpha=alpha, **arguments)
    shape, begin, _, times = found
    first = _GAMMA_PLACES * begin * times * tf.reduce_prod(shape[1:])
    steps = tf.cast(tf.stack([first, tf.zeros_like(first)]), tf.uint64)
    arguments["counter"] += steps
    return plain(shape, alpha=alpha, **arguments)


def _draw_binomial(plain: Any, shape: Any, **arguments: Any) -> Any:
    """Draw this rank's rows; numbers of its own, if its rows have arguments."""
    names = "counts", "probs"
    rank = tf.convert_to_tensor(shape).shape[0]
    if all(arguments[name].shape.rank < rank for name in names):
        return _take_rows(plain, shape, **arguments)
    arguments["seed"] = _separate(shape, arguments["seed"])
    return plain(shape, **arguments)


def _choose_apart(
    plain: Any, logits: Any, count: Any, seed: Any, **arguments: Any
) -> Any:
    """Choose by numbers of this rank alone for its rows."""
    return plain(logits, count, _separate(tf.shape(logits), seed), **arguments)


def _separate(shape: Any, seed: Any) -> Any:
    """Return the seed of this rank for a draw with rows; the given one for others."""
    found, seed = _find_rows(shape), tf.convert_to_tensor(seed)
    if found is None:
        return seed
    if trial := step_context.current().trial:
        trial.has_own_draws = True
    is_own = tf.cast(found[3] > 0, seed.dtype) * comm.rank()
    return seed + tf.stack([tf.zeros_like(is_own), is_own])


def _find_rows(shape: Any) -> tuple[Any, Any, Any, Any] | None:
    """Find what a draw of a shape has to do with the rows of the step.

    Returns:
        The shape, a vector; the first of this rank's rows; the rows of all ranks; and
        the entries of the first axis for each row, 0 if that is not the rows. `None`
        outside of a step, for one number, or where the first axis is no batch's.
    """
    context = step_context.current()
    shape = tf.convert_to_tensor(shape)
    if context.length is None or shape.shape[0] == 0:
        return None
    known = tf.get_static_value(shape, partial=True)
    is_known = known is not None and known[0] is not None
    if is_known != isinstance(context.length, int):
        return None  # it does not follow from the batch
    shape, length = tf.cast(shape, tf.int64), tf.cast(context.length, tf.int64)
    begin = context.begin
    total = context.global_rows or comm.size() if begin is None else context.rows_of_all
    if begin is None:  # right if the ranks' batches have as many rows
        begin = comm.rank() * (total // comm.size())
    # Steps of time may be beside the rows; a vector has a number for each row or none.
    is_rows = tf.equal(
        shape[0] % length if shape.shape[0] > 1 else shape[0] - length, 0
    )
    times = tf.where(is_rows, shape[0] // length, 0)
    begin, total = tf.cast(begin, tf.int64), tf.cast(total, tf.int64)
    # A copy may be behind the last row.
    return shape, begin, tf.maximum(total, begin + length), times
