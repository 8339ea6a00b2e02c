"""Divide an optimizer's state and its updates among the ranks: `shard_optimizer`.

Each rank owns a part of every variable, but of small ones (`where_cut`). For the time
of a fit the optimizer is built for variables that hold these parts, so its state is
that of parts, and Keras updates them as it updates whole variables. Of a large gradient
a rank has the average of its own part alone (`cuts_of`). After each update the parts of
all ranks are gathered into the weights. This is exact where an optimizer computes each
number of a variable by itself; a norm is that of the whole gradient. For one that needs
whole variables, each has an owner. The other ranks update one number of it, which is
not sent: TensorFlow leaves the average of a gradient that a rank does not use out of
its graph, and the other ranks would wait for that rank.

Before the fit, `begin` takes the state off the optimizer, and after it, `end` puts the
state of all ranks together again, one variable after the other.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.optimizer import step_context
from keras_dist.optimizer.nested import leaves, nested_optimizers, optimizers_of
from keras_dist.optimizer.options import Averaging
from keras_dist.optimizer.sparse import times

# Optimizers that compute each number by itself, but for the norms of gradients.
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)

# Those that need whole variables, one at a time.
BY_VARIABLE = ("Adafactor", "Lamb", "Muon")

# A variable with so many rows a rank is cut between rows: its parts differ little. One
# with two axes always is, as the rows of an `Embedding` belong together.
_ROWS = 16

# Numbers, 1 MiB of float32. Parts of smaller variables are gathered together, and their
# gradients are averaged whole. If all of them together have fewer, none is divided: the
# collective would take longer than their update.
_SMALL = 2**18

_numbers = itertools.count()

# What an optimizer needs together to update it.
By = Literal["number", "variable"]


@dataclass(frozen=True)
class Cut:
    """Where a variable, or state of the same shape, is cut.

    Args:
        shape: Of the whole variable.
        size: The number of ranks.
        owner: The rank that has all of it; `None` if each has a part.

    >>> cut = Cut((100, 3), 3)
    >>> cut.unit, [cut.bounds(rank) for rank in range(3)], cut.shape_of(0)
    ('rows', [(0, 34), (34, 67), (67, 100)], (34, 3))
    >>> cut = Cut((2, 2, 1), 3)
    >>> cut.unit, [cut.bounds(rank) for rank in range(3)], cut.shape_of(2)
    ('numbers', [(0, 2), (2, 3), (3, 4)], (1,))
    >>> cut = Cut((2, 2, 1), 3, owner=1)
    >>> cut.shape_of(0), cut.shape_of(1)
    ((0, 2, 1), (2, 2, 1))
    """

    shape: tuple[int, ...]
    size: int
    owner: int | None = None

    @property
    def unit(self) -> Literal["rows", "numbers"]:
        """What stays in one part: a row, or a single number."""
        has_many = bool(self.shape) and self.shape[0] >= _ROWS * self.size
        is_by_rows = has_many or len(self.shape) == 2 or self.owner is not None
        return "rows" if is_by_rows else "numbers"

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first unit of a rank, and the first one after its part.

        As `comm.scatter` divides them: the first ranks have one more.
        """
        count = self.shape[0] if self.unit == "rows" else math.prod(self.shape)
        if self.owner is not None:
            return 0, count if rank == self.owner else 0
        each, more = divmod(count, self.size)
        return each * rank + min(rank, more), each * (rank + 1) + min(rank + 1, more)

    @property
    def is_large(self) -> bool:
        """Whether it has collectives of its own, for its gradient and its weights."""
        return math.prod(self.shape) >= _SMALL

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        start, stop = self.bounds(rank)
        rest = self.shape[1:] if self.unit == "rows" else ()
        return (stop - start, *rest)

    def part(self, whole: Any, rank: int) -> Any:
        """Take a rank's part of a tensor or an array.

        Of what another rank owns, one number.
        """
        if self.owner not in (None, rank):
            return whole[tuple(slice(1) for _ in self.shape)]
        start, stop = self.bounds(rank)
        return self._in_units(whole)[start:stop]

    def _in_units(self, whole: Any) -> Any:
        if self.unit == "rows":
            return whole
        reshape = np.reshape if isinstance(whole, np.ndarray) else tf.reshape
        return reshape(whole, [-1])

    def summed_part(self, own: Any, *, name: str) -> Any:
        """Sum this rank's part over all ranks; a collective.

        Args:
            own: The whole tensor of this rank.
            name: Of the collective.
        """
        part = comm.scatter(self._in_units(own), "sum", name=name)
        return tf.ensure_shape(part, self.shape_of(comm.rank()))

    def sent(self, part: Any, rank: int) -> Any:
        """Take what a rank sends of its part, which is flat if one rank owns it."""
        if self.owner is None:
            return part
        return tf.reshape(part, [-1])[: None if rank == self.owner else 0]

    def is_part(self, tensor: Any, rank: int) -> bool:
        """Tell whether a tensor is a rank's part, and not the whole."""
        return tensor.shape == self.shape_of(rank) and tensor.shape != self.shape

    def part_of_rows(self, rows: tf.IndexedSlices, rank: int) -> Any:
        """Take what a rank owns of a gradient by rows."""
        if self.unit == "numbers":
            return self.part(tf.convert_to_tensor(rows), rank)
        start, stop = self.bounds(rank)
        values, shape = rows.values, self.shape_of(rank)
        if self.owner not in (None, rank):
            stop, shape = 1, (1,) * len(self.shape)
            values = values[(slice(None), *(slice(1) for _ in self.shape[1:]))]
        is_own = (rows.indices >= start) & (rows.indices < stop)
        indices = tf.boolean_mask(rows.indices, is_own) - start
        values = tf.boolean_mask(values, is_own)
        return tf.IndexedSlices(values, indices, tf.constant(shape, rows.indices.dtype))


def where_cut(
    variables: Sequence[Any], size: int, by: By | None = "number"
) -> list[Cut | None]:
    """Return where variables are cut; `None`: each rank has all of it.

    Args:
        variables: The variables of an optimizer.
        size: The number of ranks.
        by: What has to stay in one part. Whole variables are dealt out, the largest
            first, each to the rank that has least.

    >>> [bool(cut) for cut in where_cut([tf.zeros([999, 999]), tf.zeros([999])], 2)]
    [True, False]
    """
    all_cuts = [Cut(tuple(variable.shape), size) for variable in variables]
    small = sum(math.prod(cut.shape) for cut in all_cuts if not cut.is_large)
    cuts = [cut if cut.is_large or small >= _SMALL else None for cut in all_cuts]
    if by != "variable":
        return cuts
    loads = [0] * size
    for index in sorted(range(len(cuts)), key=lambda i: -math.prod(all_cuts[i].shape)):
        cut = cuts[index]
        if cut is None or not cut.shape:
            cuts[index] = None
            continue
        owner = loads.index(min(loads))
        loads[owner] += math.prod(cut.shape)
        cuts[index] = replace(cut, owner=owner)
    return cuts


def divided_by(leaf: Any) -> By | None:
    """Tell what an optimizer needs together; `None` if it is not known.

    Args:
        leaf: An optimizer of Keras; or of the user's, which says it by an attribute
            `sharded_by`.
    """
    said = getattr(leaf, "sharded_by", None)
    if said in get_args(By):
        return said
    of_keras = leaf.__class__.__module__.startswith(private.MODULES)
    name = leaf.__class__.__name__
    if not of_keras or name not in (*ELEMENTWISE, *BY_VARIABLE):
        return None
    return "variable" if name in BY_VARIABLE else "number"


def check_divisible(optimizer: Any) -> None:
    """Raise a `ValueError` if the state of an optimizer cannot be divided.

    Args:
        optimizer: An optimizer, which may hold others. Those that a `MultiOptimizer`
            makes when it is built are checked then.
    """
    for leaf in leaves(optimizer):
        _check_divisible(leaf)


def _check_divisible(leaf: Any) -> None:
    cls, by = leaf.__class__, divided_by(leaf)
    if by is None:
        known = [*ELEMENTWISE, *BY_VARIABLE]
        raise ValueError(
            "`shard_optimizer` needs to know what an optimizer updates by itself. "
            f"Received: {cls.__module__}.{cls.__name__}. Take {', '.join(known[:-1])} "
            f"or {known[-1]} of Keras; or give your class the attribute `sharded_by = "
            '"number"`, if it computes each number of a variable from that of the '
            'gradient, or "variable", if it needs all of one variable and of no other.'
        )
    steps, limit = leaf.gradient_accumulation_steps, leaf.global_clipnorm
    if by == "variable" and steps and limit:
        raise ValueError(
            "With `shard_optimizer` and an optimizer that needs whole variables, no "
            f"rank has all accumulated gradients. Received: {cls.__name__} with "
            f"global_clipnorm={limit} and gradient_accumulation_steps={steps}. Leave "
            "one out."
        )


@dataclass
class ShardedState:
    """The parts of a leaf optimizer on this rank.

    Args:
        number: Of the optimizer, the same on all ranks, from the first step on.
        whole: The variables of the model that it updates.
        parts: This rank's part of each of them, the variable itself where it is not
            cut; empty before the first step.
        held: The state that it had before, as arrays, until the first step.
        cuts: Where parts, and the state that is divided, are cut, by the identity of
            the variable that holds the part.
        squares: Sums of squares of the whole gradients of an update, by `_key` of the
            variable; where something needs them.
        updated: The parts that the update has gradients for.
        meeting: Where parts are sent to the first rank; `None` if it cannot ask.
    """

    number: int = -1
    whole: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    held: list[np.ndarray] | None = None
    cuts: dict[int, Cut] = field(default_factory=dict)
    squares: dict[int, Any] = field(default_factory=dict)
    updated: list[Any] = field(default_factory=list)
    meeting: "_Meeting | None" = None

    def squares_of(self, gradients: Sequence[Any], leaf: Any) -> list[Any]:
        """Return the sum of squares of each whole gradient.

        Args:
            gradients: Of the parts in `updated`, as they are applied.
            leaf: The optimizer.
        """
        if leaf.gradient_accumulation_steps:
            # They were added up by parts.
            squares = [_square(gradient) for gradient in gradients]
            cuts = [self.cuts.get(id(part)) for part in self.updated]
            divided = [i for i, cut in enumerate(cuts) if cut and cut.owner is None]
            if divided:
                own = tf.stack([squares[i] for i in divided])
                name = f"keras_dist.squares.{self.number}"
                [summed] = comm.sum_tensors([own], name=name, dtype=own.dtype)
                sums = tf.unstack(summed, len(divided))
                for index, square in zip(divided, sums, strict=True):
                    squares[index] = square
            return squares
        scale = leaf.loss_scale_factor or 1.0
        squares = [self.squares[_key(self.whole_of(part))] for part in self.updated]
        return [
            tf.cast(square / scale**2, gradient.dtype)
            for square, gradient in zip(squares, gradients, strict=True)
        ]

    def divided(self) -> list[tuple[Any, Any, Cut]]:
        """List the variables that are cut: the whole, this rank's part, and where."""
        return [
            (whole, part, self.cuts[id(part)])
            for whole, part in zip(self.whole, self.parts, strict=True)
            if part is not whole
        ]

    def part_of(self, variable: Any) -> tuple[Any, Cut | None]:
        """Return this rank's part of a variable of the model, and where it is cut.

        Raises:
            ValueError: If the optimizer was not built for it.
        """
        for whole, part in zip(self.whole, self.parts, strict=True):
            if whole is variable or private.value_of(whole) is variable:
                return part, self.cuts.get(id(part))
        raise ValueError(
            "An optimizer updates the variables that it was built for. "
            f"Received: {variable!r}, which is not one of them. Build the optimizer "
            "for it, or make another one."
        )

    def whole_of(self, part: Any) -> Any:
        """Return the variable of the model that a part belongs to."""
        for whole, own in zip(self.whole, self.parts, strict=True):
            if own is part or private.value_of(own) is part:
                return whole
        return part


def is_sharded(optimizer: Any) -> bool:
    """Tell whether the state of an optimizer, or of one inside it, is divided."""
    is_multi = mixin.has(nested_optimizers(optimizer)[-1], HoldsParts)
    return is_multi or bool(sharded_leaves([optimizer]))


def begin(optimizer: Any) -> None:
    """Take the state off an optimizer, until the first step divides it.

    Args:
        optimizer: An optimizer, which may hold others.

    Raises:
        ValueError: If its state cannot be divided. A step may have made it just now.
    """
    check_divisible(optimizer)
    inner = nested_optimizers(optimizer)[-1]
    if leaves(inner) != [inner]:
        mixin.add(inner, HoldsParts)
    for leaf in leaves(optimizer):
        if mixin.has(leaf, UpdatesParts):
            continue
        state = ShardedState()
        if leaf.built:
            state.whole = private.trainable_variables_of(leaf)
            state.held = [keras.ops.convert_to_numpy(v) for v in _slots(leaf)]
            private.unbuild_optimizer(leaf, _slots(leaf))
        object.__setattr__(leaf, "_sharded", state)
        mixin.add(leaf, UpdatesParts)


def state_bytes(leaf: Any, variables: Sequence[Any]) -> tuple[float, float] | None:
    """Return the size of the state of an optimizer that computes each number by itself.

    An optimizer of its kind is built for one number: each variable has as many of them.

    Args:
        leaf: The optimizer; if it needs whole variables, it is not known.
        variables: The weights that it updates.

    Returns:
        The bytes of a rank, as a mean of all ranks, and those of the whole; `None` if
        the optimizer has no config.
    """
    if divided_by(leaf) != "number":
        return None
    try:
        kind = leaf.__class__.from_config(leaf.get_config())
    except Exception:  # a schedule of the user's, which cannot be saved
        return None
    before = len(kind.variables)
    kind.build([keras.Variable(np.zeros([1]), trainable=True)])
    copies = sum(tuple(v.shape) == (1,) for v in kind.variables[before:])
    size = comm.size()
    of_rank = of_all = 0.0
    for variable, cut in zip(variables, where_cut(variables, size), strict=True):
        number = copies * math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        of_rank += number if cut is None else number / size
        of_all += number
    return of_rank, of_all


def start(optimizer: Any) -> None:
    """Build the optimizer for parts, with the first rank's state; on all ranks.

    One that is not built yet on every rank, such as a second one of a train step that
    runs eagerly, is built for parts before its first update.
    """
    if is_sharded(optimizer) and not _is_started(optimizer):
        found = sharded_leaves([optimizer])
        if all(comm.gather(any(leaf._sharded.whole for leaf in found))):
            _start(found)


def _is_started(optimizer: Any) -> bool:
    return any(leaf._sharded.parts for leaf in sharded_leaves([optimizer]))


def _start(found: Sequence[Any]) -> None:
    """Build optimizers that are one, or inside of one, for parts; on all ranks."""
    for leaf in found:
        if leaf._sharded.whole:  # else a `MultiOptimizer` has no variable for it
            _start_leaf(leaf)


def _start_leaf(leaf: Any) -> None:
    state: ShardedState = leaf._sharded
    state.number = next(_numbers)
    cuts = where_cut(state.whole, comm.size(), divided_by(leaf))
    with tf.init_scope():
        for variable, cut in zip(state.whole, cuts, strict=True):
            part = variable
            if cut is not None:
                value = cut.part(tf.convert_to_tensor(variable), comm.rank())
                name = f"{variable.name}_{len(state.parts)}"
                part = private.variable_like(variable, value, name)
                step_context.make_known(private.value_of(part).handle, "ours")
                state.cuts[id(part)] = cut
            state.parts.append(part)
        leaf.build(state.parts)
        held, state.held = state.held, None
        slots = _slots(leaf)
        if divided_by(leaf) == "variable":
            _find_owners(slots, state)
        if comm.broadcast(held is not None):
            arrays = dict(zip(map(id, slots), held or (), strict=False))
            others = [slot for slot in slots if id(slot) not in state.cuts]
            for slot in others:  # such as a number that belongs to no variable
                slot.assign(arrays.get(id(slot), slot))
            comm.broadcast_variables(others, 0)
            share_state([leaf], arrays)


def _find_owners(slots: Sequence[Any], state: ShardedState) -> None:
    """Learn the shapes of what other ranks own, such as sums over rows; a collective.

    Raises:
        ValueError: If it is not known to which variable a part of the state belongs:
            then nobody knows which rank has it. On all ranks.
    """
    paths = tuple(f"{part.path.replace('/', '_')}_" for part in state.parts)
    names = {part.name for part in state.parts}
    for slot in slots:
        is_known = slot.name in names or slot.name.startswith(paths)
        if id(slot) not in state.cuts and not is_known:
            raise ValueError(
                'With `shard_optimizer` and `sharded_by = "variable"`, all state of '
                "an optimizer belongs to a variable. Received: a state of the name "
                f"{slot.name!r} and the shape {tuple(slot.shape)}. Make it by "
                "`add_variable_from_reference`, or by `add_variable(…, "
                "name=variable.name)`; or leave out `shard_optimizer`."
            )
    of_ranks = comm.gather([tuple(slot.shape) for slot in slots])
    for index, slot in enumerate(slots):
        cut = state.cuts.get(id(slot))
        if cut is not None and cut.owner is not None:
            state.cuts[id(slot)] = replace(cut, shape=of_ranks[cut.owner][index])


def _assign(variable: Any, whole: Any, state: ShardedState) -> None:
    """Give a variable of the state its part of a value; the value, if it has none."""
    cut = state.cuts.get(id(variable))
    if cut is not None:
        if cut.owner not in (None, comm.rank()):
            return
        whole = cut.part(whole, comm.rank())
    variable.assign(whole)


def refresh(optimizer: Any, variables: Sequence[Any]) -> None:
    """Give the parts the weights of the model, which a callback may have set.

    Args:
        optimizer: An optimizer whose state is divided.
        variables: Those of its update, which begins after this.
    """
    inner = nested_optimizers(optimizer)[-1]
    if not _is_started(optimizer):
        if not mixin.has(inner, HoldsParts):
            inner._sharded.whole = inner._sharded.whole or list(variables)
        elif not inner.built:
            inner.build(variables)
        _start(sharded_leaves([optimizer]))
    for leaf in sharded_leaves([optimizer]):
        for whole, part, cut in leaf._sharded.divided():
            part.assign(cut.part(tf.convert_to_tensor(whole), comm.rank()))


def cuts_of(
    optimizer: Any,
    variables: Sequence[Any],
    gradients: Sequence[Any],
    options: Averaging,
) -> list[Cut | None]:
    """Tell of which gradients a rank needs its own part alone.

    Not where an optimizer needs whole variables, where a NaN guard looks at whole
    gradients, or their norms are clipped after a loss scale; nor where they are
    compressed together. Nor over Gloo between hosts, which takes longer to sum parts
    than to sum the whole.

    Args:
        optimizer: The outermost optimizer.
        variables: The variables of the update.
        gradients: Their gradients, tensors or `tf.IndexedSlices`.
        options: The options of the averaging.
    """
    cuts: list[Cut | None] = [None] * len(variables)
    inner = leaves(optimizer)
    if len(inner) != 1 or not mixin.has(inner[0], UpdatesParts):
        return cuts
    if divided_by(inner[0]) == "variable":
        return cuts
    if inner[0] is not optimizer and _clips_norms(inner[0]):
        return cuts
    if step_context.current().guard is not None:
        return cuts
    if options.op == "adasum" or options.compression:
        return cuts
    if comm.transport_name() == "Gloo" and comm.local_size() < comm.size():
        return cuts
    pairs = zip(variables, gradients, strict=True)
    for index, (variable, gradient) in enumerate(pairs):
        cut = Cut(tuple(variable.shape), comm.size())
        if cut.is_large and not isinstance(gradient, tf.IndexedSlices):
            cuts[index] = cut
    return cuts


def keep_squares(
    optimizer: Any,
    variables: Sequence[Any],
    averages: Sequence[Any],
    cuts: Sequence[Cut | None],
    *,
    name: str,
) -> None:
    """Sum the squares of gradients of which a rank has its part, if norms are clipped.

    Args:
        optimizer: The outermost optimizer.
        variables: Those of the gradients.
        averages: The gradients, or parts of them, that are applied.
        cuts: What `cuts_of` has returned.
        name: Of the collective.
    """
    if any(cuts) and _clips_norms(optimizer):
        divided = [index for index, cut in enumerate(cuts) if cut is not None]
        own = [_square(averages[index]) for index in divided]
        sums = comm.sum_tensors(own, name=name, dtype=tf.float64)
        for index, square, of_rank in zip(divided, sums, own, strict=True):
            key = _key(variables[index])
            optimizer._sharded.squares[key] = tf.cast(square, of_rank.dtype)


def mark_overflow(
    optimizer: Any, averages: Sequence[Any], cuts: Sequence[Cut | None], *, name: str
) -> list[Any]:
    """Let all ranks find what is not finite in the part of one, for a loss scale.

    Args:
        optimizer: The outermost optimizer.
        averages: The gradients, or parts of them, that it gets.
        cuts: What `cuts_of` has returned.
        name: Of the collective.

    Returns:
        The gradients; if any part is not finite, one of each rank is not.
    """
    marked = list(averages)
    if any(cuts) and leaves(optimizer) != [optimizer]:
        divided = [index for index, cut in enumerate(cuts) if cut is not None]
        own = tf.add_n(
            [tf.cast(tf.reduce_sum(marked[i] * 0), tf.float32) for i in divided]
        )
        [zero_or_nan] = comm.sum_tensors([own], name=name, dtype=tf.float32)
        marked[divided[-1]] += tf.cast(zero_or_nan, marked[divided[-1]].dtype)
    return marked


def gather_weights(optimizer: Any) -> None:
    """Give the model the weights that all ranks have updated."""
    for leaf in sharded_leaves([optimizer]):
        state: ShardedState = leaf._sharded
        divided = state.divided()
        pairs = [(part, cut) for _, part, cut in divided]
        values = _gathered(pairs, f"keras_dist.parts.{state.number}")
        for (whole, part, cut), value in zip(divided, values, strict=True):
            whole.assign(value)
            # The same memory, until the next update.
            part.assign(cut.part(value, comm.rank()))


def constrain(optimizer: Any) -> None:
    """Apply the constraints of whole variables, as Keras does after an update."""
    for leaf in sharded_leaves([optimizer]):
        for part in leaf._sharded.updated:
            variable = leaf._sharded.whole_of(part)
            if variable is part:
                continue  # Keras has done it
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))


def _gathered(pairs: Sequence[tuple[Any, Cut]], name: str) -> list[Any]:
    """Put parts of all ranks together; small ones in one collective a dtype.

    Args:
        pairs: Variables that hold this rank's parts, and where the whole is cut.
        name: A name for the collectives, the same on all ranks.
    """
    result: list[Any] = [None] * len(pairs)
    small: dict[str, list[int]] = {}
    for index, (part, cut) in enumerate(pairs):
        if not cut.is_large:
            small.setdefault(keras.backend.standardize_dtype(part.dtype), []).append(
                index
            )
        else:
            own = cut.sent(tf.convert_to_tensor(part), comm.rank())
            gathered = comm.gather_rows(own, name=f"{name}.{index}")
            result[index] = tf.reshape(gathered, cut.shape)
    for dtype, indices in sorted(small.items()):
        cuts = [pairs[i][1] for i in indices]
        own = [
            tf.reshape(cut.sent(tf.convert_to_tensor(pairs[i][0]), comm.rank()), [-1])
            for i, cut in zip(indices, cuts, strict=True)
        ]
        flat = comm.gather_rows(tf.concat(own, axis=0), name=f"{name}.{dtype}")
        ranks = range(comm.size())
        lengths = [math.prod(cut.shape_of(rank)) for rank in ranks for cut in cuts]
        pieces = tf.split(flat, lengths)
        for position, (index, cut) in enumerate(zip(indices, cuts, strict=True)):
            of_ranks = pieces[position :: len(indices)]
            result[index] = tf.reshape(tf.concat(of_ranks, axis=0), cut.shape)
    return result


def end(optimizer: Any) -> None:
    """Make the optimizer a plain one again, with its whole state; on all ranks."""
    mixin.remove(nested_optimizers(optimizer)[-1], HoldsParts)
    for leaf in sharded_leaves([optimizer]):
        state: ShardedState = leaf._sharded
        if state.parts:
            _make_whole(leaf)
            continue
        mixin.remove(leaf, UpdatesParts)
        if state.held is not None:
            leaf.build(state.whole)
            for slot, value in zip(_slots(leaf), state.held, strict=True):
                slot.assign(value)


def _make_whole(leaf: Any) -> None:
    """Build the optimizer for whole variables, each from the parts of all ranks."""
    state: ShardedState = leaf._sharded
    for _, part, _ in state.divided():
        _free(part)
    # All of them until the end, so that no new variable has their identity.
    before = leaf.variables
    values = (_merged(v, state) for v in before if _is_given(state.cuts.get(id(v))))
    private.unbuild_optimizer(leaf, _slots(leaf))
    mixin.remove(leaf, UpdatesParts)
    object.__setattr__(leaf, "_whole_state", values)
    mixin.add(leaf, _MakesWhole)
    try:
        leaf.build(state.whole)
    finally:
        mixin.remove(leaf, _MakesWhole)
        object.__delattr__(leaf, "_whole_state")  # it refers to the parts
    for variable, old in zip(leaf.variables, before, strict=True):
        if variable is not old and not _is_given(state.cuts.get(id(old))):
            variable.assign(_merged(old, state) if id(old) in state.cuts else old)


def _is_given(cut: Cut | None) -> bool:
    """Tell whether state is put together while the optimizer is built with it.

    Not what one rank owns: it may not have the shape of a variable.
    """
    return cut is not None and cut.owner is None


def _merged(part: Any, state: ShardedState) -> Any:
    """Put a variable of the state together, and free this rank's part of it."""
    cut = state.cuts[id(part)]
    [whole] = _gathered([(part, cut)], f"keras_dist.state.{state.number}")
    _free(part)
    return whole


def _free(variable: Any) -> None:
    """Free the memory of a variable; a step that was traced may still refer to it."""
    resource = private.value_of(variable).handle
    empty = tf.zeros([0], variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=resource, value=empty)


def abandon(optimizer: Any) -> None:
    """Make the optimizer a plain one without collectives, after an error of one rank.

    The parts of the other ranks are out of reach. The optimizer keeps its counter and
    its rate, and begins without other state when it is used next.
    """
    mixin.remove(nested_optimizers(optimizer)[-1], HoldsParts)
    for leaf in sharded_leaves([optimizer]):
        if leaf._sharded.parts:
            private.unbuild_optimizer(leaf, _slots(leaf))
            mixin.remove(leaf, UpdatesParts)
        else:
            end(leaf)


def sharded_leaves(optimizers: Sequence[Any]) -> list[Any]:
    """List the optimizers, also inside of others, whose state is divided."""
    found = [leaf for each in optimizers for leaf in leaves(each)]
    return [leaf for leaf in found if mixin.has(leaf, UpdatesParts)]


@contextlib.contextmanager
def sending_parts(optimizers: Sequence[Any]) -> Iterator[None]:
    """Inside the block, the first rank may save optimizers, alone or with others.

    At the end of the block the others wait for what it asks for, one variable after the
    other, until it leaves the block, too.

    Args:
        optimizers: The same on all ranks.
    """
    sharded = [leaf for leaf in sharded_leaves(optimizers) if leaf._sharded.parts]
    if not sharded:
        yield
        return
    meeting = _Meeting({leaf._sharded.number: leaf for leaf in sharded})
    before = [leaf._sharded.meeting for leaf in sharded]  # of a block around this one
    for leaf in sharded:
        leaf._sharded.meeting = meeting
    try:
        yield
    finally:
        if comm.rank() == 0:
            comm.broadcast(_END)
        elif not meeting.is_over:
            meeting.answer(_END)
        for leaf, outer in zip(sharded, before, strict=True):
            leaf._sharded.meeting = outer


@contextlib.contextmanager
def whole_state(*of: keras.Model | keras.optimizers.Optimizer) -> Iterator[None]:
    """A `with` block to save models whose optimizers are divided among the ranks.

    `DistributedOptimizer(…, shard_optimizer=True)` gives each rank a part of the state.
    All ranks have to come to this block. In it the first one may save, or each of them
    to a file of its own: the parts are put together one variable after the other. An
    error in it is raised on all ranks. After a save of the first rank alone, nothing in
    the block may be a collective. Callbacks of `dist_fit` need no such block.

    Args:
        of: The models that are saved, or their optimizers.

    Returns:
        A context manager.

    Raises:
        Exception: On all ranks, if the block failed on one of them.

    Example:

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> with whole_state(model):
    ...     if comm.rank() == 0:
    ...         print("saved here, by model.save")
    saved here, by model.save
    """
    optimizers: list[Any] = []
    for each in of:
        is_model = isinstance(each, keras.Model)
        optimizers += optimizers_of(each) if is_model else [each]
    with comm.failing_together(), sending_parts(optimizers):
        yield


# What the first rank asks for: the numbers of an optimizer and of its variable.
_END = (-1, -1)


@dataclass
class _Meeting:
    """All ranks are here: the first one may ask for parts, and says when it is done.

    Args:
        leaves: Optimizers by number.
        is_over: Whether the first rank is done.
    """

    leaves: Mapping[int, Any]
    is_over: bool = False

    def answer(self, last: tuple[int, int]) -> Any:
        """Send parts of this rank, up to those that it asks for itself.

        Args:
            last: The optimizer and the variable of which it needs the whole, or `_END`.

        Returns:
            That variable; `None` for `_END`.

        Raises:
            RuntimeError: If the first rank does not ask for it.
        """
        while not self.is_over:
            asked: Any = comm.broadcast(None)
            self.is_over = asked == _END
            if not self.is_over:
                value = _whole(self.leaves[asked[0]], asked[1])
                if asked == last:
                    return value
        if last == _END:
            return None
        raise RuntimeError(
            "A rank cannot save the state of an optimizer that is divided among the "
            "ranks, if the first rank does not. Received: a save of this rank alone in "
            "a fit with shard_optimizer=True. Save on all ranks, or on the first one."
        )


def _whole(leaf: Any, index: int) -> np.ndarray:
    """Put a variable of the state together; a collective."""
    value = _whole_of(leaf.variables[index], leaf._sharded, index)
    return np.asarray(keras.ops.convert_to_numpy(value))


def _whole_of(variable: Any, state: ShardedState, index: int) -> Any:
    cut = state.cuts.get(id(variable))
    if cut is None:
        return variable
    return _gathered([(variable, cut)], f"keras_dist.state.{state.number}.{index}")[0]


def whole_shapes(optimizers: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Return the whole shape of each variable that holds a part, by its identity."""
    found: dict[int, tuple[int, ...]] = {}
    for leaf in sharded_leaves(optimizers):
        cuts = leaf._sharded.cuts
        ids = [id(variable) for variable in leaf.variables]
        found |= {key: cuts[key].shape for key in ids if key in cuts}
    return found


def whole_values(optimizers: Sequence[Any]) -> Iterator[tuple[Any, np.ndarray]]:
    """Put the divided state together, one variable after the other; on all ranks."""
    for leaf in sharded_leaves(optimizers):
        for index, variable in enumerate(leaf.variables):
            if id(variable) in leaf._sharded.cuts:
                yield variable, _whole(leaf, index)


def share_state(optimizers: Sequence[Any], arrays: Mapping[int, np.ndarray]) -> None:
    """Give each rank its parts of what the first rank has restored; on all ranks.

    Args:
        optimizers: Optimizers, the same on all ranks.
        arrays: Whole values by the identity of the variable; of the first rank.
    """
    for leaf in sharded_leaves(optimizers):
        state: ShardedState = leaf._sharded
        for variable in leaf.variables:
            if id(variable) in state.cuts:
                dtype = keras.backend.standardize_dtype(variable.dtype)
                empty = np.empty(state.cuts[id(variable)].shape, dtype)
                own = arrays.get(id(variable), empty)
                [value] = comm.broadcast_arrays([np.asarray(own, dtype)], 0)
                _assign(variable, value, state)


def exchanges_in_update(optimizers: Sequence[Any]) -> bool:
    """Tell whether an update itself has a collective, which XLA cannot compile.

    The norm of accumulated gradients, of which each rank has a part.
    """
    return any(
        leaf.gradient_accumulation_steps and _clips_norms(leaf)
        for leaf in sharded_leaves(optimizers)
    )


def _slots(leaf: Any) -> list[Any]:
    """List the variables of an optimizer but those that it has before it is built."""
    before = (private.batches_of(leaf), private.rate_of(leaf))
    return [v for v in leaf.variables if not any(v is other for other in before)]


class UpdatesParts:
    """Mixin for a leaf optimizer whose state is divided among the ranks."""

    _sharded: ShardedState

    def build(self, variables: Any) -> None:
        state = self._sharded
        if variables is state.parts:
            super().build(variables)  # type: ignore[misc]
        elif not state.parts:
            state.whole = list(variables)  # and built when the weights are sent

    def add_variable_from_reference(
        self, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = super().add_variable_from_reference(  # type: ignore[misc]
            reference_variable, *args, **kwargs
        )
        cut = self._sharded.cuts.get(id(reference_variable))
        if cut is not None:
            self._sharded.cuts[id(made)] = cut
        return made

    def add_variable(self, *args: Any, **kwargs: Any) -> Any:
        made = super().add_variable(*args, **kwargs)  # type: ignore[misc]
        for _, part, cut in self._sharded.divided():
            # `Adafactor` names so what it keeps of rows and of columns.
            if cut.owner is not None and kwargs.get("name") == part.name:
                shape = tuple(made.shape)
                self._sharded.cuts[id(made)] = replace(cut, shape=shape)
        return made

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        state = self._sharded
        variables = list(trainable_variables or state.whole)
        if not state.parts:
            # The step is traced to make its variables, and nothing is updated.
            state.whole = state.whole or variables
            return
        rank, own, parts = comm.rank(), [], []
        for gradient, variable in zip(grads, variables, strict=True):
            part, cut = state.part_of(variable)
            is_rows = isinstance(gradient, tf.IndexedSlices)
            is_whole = gradient is not None
            if cut is not None and is_whole and not is_rows:
                is_whole = not cut.is_part(gradient, rank)
            if is_whole and _clips_norms(self):
                state.squares[_key(variable)] = _square(gradient)
            if cut is not None and is_whole:
                take = cut.part_of_rows if is_rows else cut.part
                gradient = take(gradient, rank)
            own.append(gradient)
            parts.append(part)
        super().apply(own, parts)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Any) -> None:
        state = self._sharded
        if not self.use_ema or not state.parts:  # type: ignore[attr-defined]
            return
        super().finalize_variable_values(state.parts)  # type: ignore[misc]
        gather_weights(self)

    def save_own_variables(self, store: Any) -> None:
        for index, value in enumerate(_saved_values(self)):
            store[str(index)] = value

    def load_own_variables(self: Any, store: Any) -> None:
        state = self._sharded
        values = [np.asarray(store[str(index)]) for index in range(len(store.keys()))]
        if state.parts:
            for variable, value in zip(self.variables, values, strict=True):
                _assign(variable, value, state)
            return
        before = self.variables
        for variable, value in zip(before, values, strict=False):
            variable.assign(value)
        state.held = values[len(before) :]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._sharded.updated = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self: Any, grads: Any) -> Any:
        limit = self.clipnorm or self.global_clipnorm
        if not limit:
            return super()._clip_gradients(grads)  # type: ignore[misc]
        squares = self._sharded.squares_of(grads, self)
        if self.global_clipnorm:
            factor = limit / tf.maximum(tf.sqrt(tf.add_n(squares)), limit)
            # Keras makes gradients by rows whole here, too.
            return [tf.convert_to_tensor(gradient) * factor for gradient in grads]
        return [
            times(gradient, limit / tf.maximum(tf.sqrt(square), limit))
            for gradient, square in zip(grads, squares, strict=True)
        ]

    def _use_weight_decay(self, variable: Any) -> bool:
        whole = self._sharded.whole_of(variable)
        return bool(super()._use_weight_decay(whole))  # type: ignore[misc]


def _saved_values(leaf: Any) -> Iterator[np.ndarray]:
    """Yield the whole value of each variable of an optimizer that is saved."""
    state: ShardedState = leaf._sharded
    if not state.parts:
        yield from map(keras.ops.convert_to_numpy, leaf.variables)
        yield from state.held or ()
        return
    if state.meeting is None:
        raise RuntimeError(
            "The state of an optimizer that is divided among the ranks can be saved "
            "where all ranks are: by callbacks of `dist_fit` at the beginning and the "
            "end of epochs, evaluations and the training, and by all in `with "
            "keras_dist.whole_state(model):`. Received: a save in another place, such "
            "as after a batch, of an optimizer with shard_optimizer=True. Save there, "
            "or after the fit."
        )
    for index in range(len(leaf.variables)):
        asked = (state.number, index)
        if comm.rank() == 0:
            comm.broadcast(asked)
            yield _whole(leaf, index)
        else:
            yield state.meeting.answer(asked)


class HoldsParts:
    """Mixin for a `MultiOptimizer` that holds optimizers whose state is divided."""

    def build(self, variables: Any) -> None:
        super().build(variables)  # type: ignore[misc]
        begin(self)  # those that it has made just now

    def save_own_variables(self: Any, store: Any) -> None:
        inside = {id(v) for leaf in leaves(self) for v in leaf.variables}
        own = [v for v in self.variables if id(v) not in inside]
        of_leaves = map(_saved_values, leaves(self))
        values = itertools.chain(map(keras.ops.convert_to_numpy, own), *of_leaves)
        for index, value in enumerate(values):
            store[str(index)] = value

    def load_own_variables(self: Any, store: Any) -> None:
        if not _is_started(self):
            raise ValueError(
                "The optimizers inside of a `MultiOptimizer` whose state is divided "
                "among the ranks are built in the first step. Received: a file that is "
                "loaded before it, as by BackupAndRestore. Load it before the fit, or "
                "use `resume` of `dist_fit`."
            )
        states = {id(v): leaf._sharded for leaf in leaves(self) for v in leaf.variables}
        for index, variable in enumerate(self.variables):
            value = np.asarray(store[str(index)])
            state = states.get(id(variable))
            if state is None:
                variable.assign(value)
            else:
                _assign(variable, value, state)


class _MakesWhole:
    """Mixin for a leaf optimizer that is built with the state of all ranks."""

    _sharded: ShardedState
    _whole_state: Iterator[Any]

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        found = self._sharded.part_of(reference_variable)
        if _is_given(found[1]):
            initializer = functools.partial(_as_it_is, next(self._whole_state))
        return super().add_variable_from_reference(  # type: ignore[misc]
            reference_variable, name, initializer
        )


def _as_it_is(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a value, as an initializer does."""
    return value


def _clips_norms(leaf: Any) -> bool:
    return bool(leaf.clipnorm or leaf.global_clipnorm)


def _key(variable: Any) -> int:
    """The identity of TensorFlow's variable, which Keras may have wrapped."""
    inner = private.value_of(variable)
    return id(variable if inner is None else inner)


def _square(gradient: Any) -> Any:
    """Sum the squares of a gradient's numbers."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_rows else tf.convert_to_tensor(gradient)
    return tf.reduce_sum(tf.square(values))
