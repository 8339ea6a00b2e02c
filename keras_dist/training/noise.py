"""Random numbers of a step: those of one process, of which each rank draws its rows.

TensorFlow's stateless generators are counters: number i depends on the seed and on i
alone. All ranks have the same states of their generators, and where the first axis of a
draw is the rows of the batch, a rank skips the numbers of the rows before its own. It
draws as many as without that.
"""

import contextlib
import functools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

# Operations of `tf.random` whose kernels keep a counter, each with the function above
# that draws the same numbers from a given one, and its own arguments after the shape.
_KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "random_standard_normal": ("stateless_random_normal_v2", ("dtype",)),
    "random_uniform": ("stateless_random_uniform_v2", ("dtype",)),
    "random_uniform_int": ("stateless_random_uniform_int_v2", ("minval", "maxval")),
    "truncated_normal": ("stateless_truncated_normal_v2", ("dtype",)),
}

# Places of the counter that such a kernel, and that of gamma numbers, has for each.
_PLACES = 256

# The algorithm of the counter, and what TensorFlow divides seeds by.
_PHILOX, _SEEDS = 1, 2**31 - 1


class StepNoise:
    """Numbers that functions without a seed draw in the steps of one model.

    Functions of `keras.random` draw those of one process; so does `tf.random` in a
    graph, after `keras.utils.set_random_seed`. What else `tf.random` draws would be the
    same on all ranks, for other rows: there each rank draws its own. An update draws
    alike on all ranks: it changes weights.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._shared_seed: int | None = None
        # A step in which one is made would be traced once more.
        self._generator: Any = keras.random.SeedGenerator(0)
        self._begun: Any = None  # its state as the fit began
        self._replaced: Any = None  # the generator of Keras
        self._places: dict[Any, tf.Variable] = {}  # of the counters of kernels
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

    def list_places(self) -> list[Any]:
        """List the states of the kernels that draw in evaluations."""
        return [place for key, place in self._places.items() if key[0] == "test"]

    @contextlib.contextmanager
    def draw_batch_numbers(self) -> Iterator[None]:
        """Context manager in which an evaluation's batch is traced, or run eagerly."""
        draw = _draw_from(self._generator, lambda seed: seed)
        with _draw_kernels(self._make_finder("test")), draw:
            yield

    @contextlib.contextmanager
    def draw_step_numbers(self) -> Iterator[None]:
        """Context manager in which a step is traced, or runs eagerly.

        What a graph draws otherwise than one process is in `own_draws` then.
        """
        own, graph = self._seed, tf.compat.v1.get_default_graph()
        assert own is not None  # `prepare` was called before the first step
        before = 0 if tf.executing_eagerly() else len(graph.get_operations())
        find = self._make_finder("train")
        with draw_rows(self._generator, lambda seed: (seed + own) % 2**31, find):
            yield
        if not tf.executing_eagerly():
            operations = graph.get_operations()[before:]
            own_draws = {o.type for o in operations if f"{_APART}/Stateless" in o.name}
            types = {operation.type for operation in operations}
            self.own_draws = sorted({*own_draws, *filter(_OWN.match, types)})

    def _make_finder(self, kind: str) -> Any:
        """Return what finds counters in the graph of a step; `None` without a graph."""
        if tf.executing_eagerly():
            return None
        step, counts = tf.compat.v1.get_default_graph(), Counter[Any]()
        return functools.partial(self._find_counter, kind, step, counts)

    def _find_counter(
        self,
        kind: str,
        step: Any,
        counts: Counter[Any],
        name: str,
        seed: int,
        seed2: int,
    ) -> tuple[int, Any] | None:
        """Find from where an operation of `tf.random` draws in this step: `draw_rows`.

        In a loop, which may be one over rows, it draws by its kernel; so it does in an
        update.

        Args:
            kind: "train" or "test".
            step: The graph of the step.
            counts: How often each operation was traced with the same seeds.
            name: Of the operation.
            seed, seed2: Its seeds, of the global one and its own.
        """
        shared, graph = self._shared_seed, tf.compat.v1.get_default_graph()
        is_update = kind == "train" and step_context.current().length is None
        if graph is not step or is_update or shared is None or not seed + seed2:
            return None
        if graph.seed is not None and seed == graph.seed % _SEEDS:
            seed = shared % _SEEDS  # that of one process
        if not (seed or seed2):
            seed2 = _SEEDS  # for TensorFlow, 0 and 0 are no seeds
        counts[name, seed, seed2] += 1
        key = kind, name, seed, seed2, counts[name, seed, seed2]
        if key not in self._places:  # else the step was traced before
            self.set_places([(key, 0)])
        return seed, self._places[key]

    def read_places(self) -> list[tuple[Any, int]]:
        """Return where the counters of kernels are, for a checkpoint."""
        return [(key, int(place[1])) for key, place in self._places.items()]

    def set_places(self, places: Iterable[tuple[Any, int]]) -> None:
        """Set where the counters of kernels are, before the step is traced."""
        for key, place in places:
            with tf.init_scope():
                found = tf.Variable([key[3], place], False, dtype=tf.int64)
            self._places[tuple(key)] = found

    def forget_places(self) -> None:
        """Start all kernels from 0: the functions that used them are gone."""
        self._places.clear()

    @contextlib.contextmanager
    def draw_common_numbers(self) -> Iterator[None]:
        """Context manager in such a step for its update, which has no rows."""
        without_rows = replace(step_context.current(), length=None)
        draw = _draw_from(self._generator, lambda _: self._shared_seed)
        with step_context.enter(without_rows), draw:
            yield


@contextlib.contextmanager
def draw_rows(
    generator: Any,
    change: Callable[[int], int | None],
    find_counter: Callable[[str, int, int], tuple[int, Any] | None] | None,
) -> Iterator[None]:
    """Context manager in which a step draws its rows of the numbers of all rows.

    Args:
        generator: The `SeedGenerator` for functions of `keras.random` without a seed.
        change: Changes the seed of operations of `tf.random`.
        find_counter: Of `_draw_kernels`.
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
        stack.enter_context(_draw_kernels(find_counter))
        stack.enter_context(_draw_from(generator, change))
        yield


@contextlib.contextmanager
def _draw_kernels(find_counter: Any) -> Iterator[None]:
    """Context manager in which `tf.random` draws from counters.

    Args:
        find_counter: Finds a seed and the two halves of a counter, the high one first,
            by the name and the seeds of an operation; `None` if it draws by its kernel.
            A variable goes on. `None` if all draw by their kernels.
    """
    operations = private.stateful_random_operations()
    with contextlib.ExitStack() as stack:
        for name in _KERNELS if find_counter else ():
            draw = functools.partial(_draw_by_counter, name, find_counter)
            stack.enter_context(mixin.replace_method(operations, name, draw))
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


def _draw_by_counter(
    kind: str, find: Any, plain: Any, shape: Any, /, *args: Any, **more: Any
) -> Any:
    """Draw this rank's rows of what the kernel of one process draws."""
    function, names = _KERNELS[kind]
    given = dict(zip(names, args, strict=False)) | more
    seeds = given.pop("seed", 0), given.pop("seed2", 0)
    found = None if private.is_compiled_by_xla() else find(kind, *seeds)
    if found is None:
        return plain(shape, *args, **more)
    seed, place = found
    numbers = getattr(private.random_operations(function), function)(
        shape,
        key=tf.constant([seed], tf.uint64),
        counter=tf.reverse(tf.cast(place, tf.uint64), [0]),
        alg=_PHILOX,
        **given,
    )
    if isinstance(place, tf.Variable):
        count, rows = tf.size(numbers, tf.int64), _find_rows(shape)
        if rows is not None:
            (size, _, total, times), context = rows, step_context.current()
            if context.begin is not None:  # without a copy
                total = tf.cast(context.rows_of_all, tf.int64)
            every = tf.where(times > 0, total * times, size[0])
            count = every * tf.reduce_prod(size[1:])
        place.assign_add(tf.stack([0, _PLACES * count]))
    return numbers


def set_keras_state(value: Any) -> None:
    """Set from where functions of `keras.random` without a seed draw, in a fit, too."""
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
    # XLA pairs the halves of normal numbers; rows in blocks are not side by side.
    is_paired = "normal" in plain.__name__ and private.is_compiled_by_xla()
    if is_paired or step_context.current().kinds.in_blocks:
        return _take_rows(plain, shape, **arguments)
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
    every = tf.where(times > 0, total * times, shape[:1])
    whole = plain(tf.concat([every, shape[1:]], 0), **arguments)
    # In blocks, each has an entry for each row; else a row's entries are side by side.
    blocks = tf.maximum(times, 1) if step_context.current().kinds.in_blocks else 1
    numbers, length = tf.range(shape[0]), tf.maximum(shape[0] // blocks, 1)
    indices = numbers // length * total + begin * (times // blocks) + numbers % length
    return tf.reshape(tf.gather(whole, indices), shape)


def _draw_gamma(plain: Any, shape: Any, *, alpha: Any, **arguments: Any) -> Any:
    """Draw this rank's rows: number i has its own places of the counter."""
    found = _find_rows(shape)
    if found is None or alpha.shape.rank < found[0].shape[0]:  # `alpha` has no rows
        return _take_rows(plain, shape, alpha=alpha, **arguments)
    shape, begin, _, times = found
    first = _PLACES * begin * times * tf.reduce_prod(shape[1:])
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
    # A length of the batch may be unknown here that is known elsewhere.
    is_known = known is not None and known[0] is not None
    if is_known and not isinstance(context.length, int):
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
    if context.trial is not None:
        context.trial.has_draws = True
    # A copy may be behind the last row.
    return shape, begin, tf.maximum(total, begin + length), times
