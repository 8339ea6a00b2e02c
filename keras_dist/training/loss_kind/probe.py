"""Which terms of a scalar are means and which are sums, by trying them on numbers."""

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.optimizer import step_context

# Operations of two tensors whose axes have the same lengths, or one of them is 1.
_BROADCASTING = {"Add", "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference"}
_BROADCASTING |= {"Maximum", "Minimum", "SelectV2", "DivNoNan"}

# Where a graph begins: values that are known when it runs.
_INPUTS = {"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "_Arg"}


def num_rows(data: Any) -> Any:
    """Rows in a batch: the length of the first axis of its targets, or of its inputs.

    Inputs may be longer, as the atoms of a batch of molecules that is one graph.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaf in (*keras.tree.flatten(y), *keras.tree.flatten(x)):
        if leaf is not None and len(leaf.shape):
            return tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0]
    return 1


def rows_fixed_in(graph: Any) -> int | None:
    """Find the number of rows that a graph is bound to, though the shape is open.

    A step may add an array of a constant number of rows to its batch, such as noise;
    the sum has as many.

    Args:
        graph: A graph in which a train step is traced.
    """
    for op in graph.get_operations():
        if op.type in _BROADCASTING and op.outputs[0].shape.rank:
            rows, rank = op.outputs[0].shape[0], op.outputs[0].shape.rank
            shapes = [t.shape for t in op.inputs if t.shape.rank == rank]
            if rows is not None and any(shape[0] is None for shape in shapes):
                return rows
    return None


class RowGraph:
    """Reads one graph.

    Args:
        rows: The number of rows of the batch, if the graph is traced with it; `None` if
            shapes leave it open.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows if rows is not None and rows > 1 else None
        self._memory: dict[Any, bool] = {}

    def has_rows(self, tensor: Any) -> bool:
        """Tell whether an axis of a tensor is as long as the batch, or open."""
        shape = tensor.shape
        if shape.rank is None or None in tuple(shape):
            return tensor.dtype not in (tf.resource, tf.variant)
        is_long = bool(shape.rank) and shape[0] == self.rows
        return is_long and self._reaches(tensor, self._is_batch, "batch")

    def depends_on_rows(self, tensor: Any) -> bool:
        """Tell whether a tensor is computed from one that has rows."""
        if step_context.known_as(tensor) == "constant":
            return False
        return self._reaches(tensor, self._begins_rows, "rows")

    def is_read(self, tensor: Any) -> bool:
        """Tell whether a tensor is computed from values that are known when it runs."""
        return self._reaches(tensor, is_input, "reads")

    def depends_on(self, tensor: Any, sources: Sequence[Any]) -> bool:
        """Tell whether a tensor has a gradient with respect to some variables."""
        plain = [s.value if isinstance(s, keras.Variable) else s for s in sources]
        handles = {id(source.handle) for source in plain}
        captured = {
            id(inner)
            for outer, inner in getattr(tensor.graph, "captures", [])
            if id(outer) in handles
        }
        found = handles | captured
        purpose = f"sources {sorted(handles)}"
        return self._reaches(
            tensor, lambda t: id(t) in found, purpose, is_passed=_has_gradient
        )

    def _begins_rows(self, tensor: Any) -> bool:
        if step_context.known_as(tensor) == "mean":
            return True
        return self.has_rows(tensor) if self.rows is None else self._is_batch(tensor)

    def _is_batch(self, tensor: Any) -> bool:
        shape = tensor.shape
        if tensor.dtype in (tf.resource, tf.variant) or shape.rank == 0:
            return False
        if shape.rank is None or None in tuple(shape):
            return True
        return tensor.op.type in _INPUTS and shape[0] == self.rows

    def _reaches(
        self,
        tensor: Any,
        is_end: Callable[[Any], bool],
        purpose: str,
        is_passed: Callable[[Any], bool] = lambda tensor: True,
    ) -> bool:
        """Search a tensor and all before it for an end, without recursion.

        Args:
            tensor: Where to begin.
            is_end: Tells an end.
            purpose: What is looked for: answers are remembered.
            is_passed: Whether to look at what a tensor is computed from.
        """
        seen, todo = set(), [tensor]
        while todo:
            current = todo.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            key = (purpose, id(current))
            known = self._memory.get(key)
            if known or (known is None and is_end(current)):
                self._memory[(purpose, id(tensor))] = True
                return True
            is_open = known is None and step_context.known_as(current) is None
            if is_open and is_passed(current):
                todo += current.op.inputs
        for found in seen:
            self._memory[(purpose, found)] = False
        return False


def _has_gradient(tensor: Any) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_complex
    return is_number and tensor.op.type != "StopGradient"


def is_input(tensor: Any) -> bool:
    """Tell whether a value is known only when the graph runs."""
    return tensor.op.type in _INPUTS or tensor.op.op_def.is_stateful


# Operations that work on each element by itself, or within rows.
_ELEMENTWISE = {"Add", "AddV2", "Sub", "Mul", "RealDiv", "DivNoNan", "Cast", "Neg"}
_ELEMENTWISE |= {"Identity", "Square", "Maximum", "Minimum", "SelectV2", "BroadcastTo"}
_ELEMENTWISE |= {"ExpandDims", "Squeeze", "Reshape", "Fill", "Tile"}
_BRANCHES = {"If", "StatelessIf"}
# And those of scalars alone.
_DECISIONS = _BRANCHES | {"Equal", "NotEqual", "Less", "LessEqual", "Greater"}
_DECISIONS |= {"GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot"}
_ROWS = ((2,), (3,))  # the two sets of rows; those of a selection are (4,) and (1,)
_SELECTED = ((4,), (1,))
_MOST_NUMBERS = 2**24
_MOST_OPERATIONS = 300


class Undecided(Exception):
    """A scalar is neither a mean nor a sum over rows, as far as can be seen."""


class Kind(enum.Enum):
    """What a scalar is of the rows."""

    MEAN = "a mean over rows, or independent of them"
    SUM = "a sum over rows"
    OTHER = "neither"


class Probe:
    """Tries scalars of one graph.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: RowGraph) -> None:
        self._graph = graph
        self._kinds: dict[int, Kind] = {}
        self._of_all: dict[int, Any] = {}

    @property
    def graph(self) -> RowGraph:
        """The graph that is read."""
        return self._graph

    def counts_rows(self, op: Any) -> bool:
        """Tell whether the number of rows is a constant factor or divisor.

        `tf.shape(x)[0]` is one where a graph is traced with a number of rows.
        """
        if self._graph.rows is None or op.type not in ("Mul", "RealDiv", "DivNoNan"):
            return False
        return any(self._is_count(t, op) for t in op.inputs)

    def _is_count(self, tensor: Any, op: Any) -> bool:
        if tensor.op.type == "Const" and (op.type == "Mul" or tensor is op.inputs[0]):
            return False  # a factor that a script has by chance
        if tensor.shape.rank != 0 or step_context.known_as(tensor):
            return False
        if self._graph.is_read(tensor):
            return False
        leaves, inner = Probe(RowGraph())._cut(tensor)
        if leaves:
            return False  # a loss whose kind is known
        return _function(tensor, {}, inner)() == self._graph.rows

    def kind_of(self, scalar: Any) -> Kind:
        """Return what a scalar is of the rows.

        Raises:
            Undecided: If its operations cannot be run by themselves.
        """
        if step_context.known_as(scalar) or not self._graph.depends_on_rows(scalar):
            return Kind.MEAN
        if id(scalar) not in self._kinds:
            self._kinds[id(scalar)] = self._try(scalar)
        return self._kinds[id(scalar)]

    def of_all(
        self,
        tensor: Any,
        total: Callable[[Any, Kind], Any] | None,
        sources: Sequence[Any] = (),
    ) -> Any:
        """Compute a divisor of the global batch, or weights that were divided by it.

        Scalars in it that are sums or means over rows are replaced by those of all
        ranks, once in each graph, and what was computed from them, element by element,
        is computed again.

        Args:
            tensor: A scalar, or a tensor with rows.
            total: Returns a scalar of all ranks, given this rank's and its kind; `None`
                to replace nothing, and only to see whether it could be done.
            sources: Variables on which such a scalar may not depend.

        Returns:
            `tensor` itself if there is no such scalar in it.

        Raises:
            Undecided: If a scalar is neither a sum nor a mean, or has a gradient.
        """
        made = {} if total is None else self._of_all

        def again(tensor: Any) -> Any:
            if id(tensor) not in made:
                made[id(tensor)] = compute(tensor)
            return made[id(tensor)]

        def compute(tensor: Any) -> Any:
            op, is_scalar = tensor.op, tensor.shape.rank == 0
            if not (self._graph.has_rows(tensor) or is_scalar):
                return tensor
            if step_context.known_as(tensor) or not self._graph.depends_on_rows(tensor):
                return tensor
            inputs = list(op.inputs)
            is_inner = op.type in _ELEMENTWISE or op.type in (
                _DECISIONS if is_scalar else _BRANCHES
            )
            if is_scalar:
                is_inner &= all(part.shape.rank == 0 for part in inputs)
            if is_inner and inputs:
                others = [again(part) for part in inputs]
                if all(a is b for a, b in zip(inputs, others, strict=True)):
                    return tensor
                return _copy(op, others)[tensor.value_index]
            if not is_scalar or tensor.dtype in (tf.bool, tf.resource, tf.variant):
                return tensor
            kind = self.kind_of(tensor)
            if kind is Kind.OTHER:
                raise Undecided(f"because of {op.type}, in a divisor")
            if self._graph.depends_on(tensor, sources):
                raise Undecided(f"because of {op.type}, a divisor with a gradient")
            return (
                tensor if total is None else tf.cast(total(tensor, kind), tensor.dtype)
            )

        return again(tensor)

    def _try(self, scalar: Any) -> Kind:
        leaves, inner = self._cut(scalar)
        function = _function(scalar, leaves, inner)
        half = scalar.dtype in (tf.float16, tf.bfloat16)
        kinds = {
            _kind([function(*values) for values in _numbers(leaves, seed)], half=half)
            for seed in (0, 1)
        }
        return kinds.pop() if len(kinds) == 1 else Kind.OTHER

    def _cut(self, scalar: Any) -> tuple[dict[int, "_Leaf"], list[Any]]:
        """Return the tensors to replace by numbers, and the operations after them."""
        leaves: dict[int, _Leaf] = {}
        inner: dict[int, Any] = {}
        todo = [scalar]
        while todo:
            tensor = todo.pop()
            if id(tensor) in leaves or (id(tensor) in inner and tensor is not scalar):
                continue
            if self._is_leaf(tensor):
                leaves[id(tensor)] = _Leaf(tensor, self._graph)
                continue
            if len(inner) == _MOST_OPERATIONS:
                raise Undecided("because of a long computation on values without rows")
            _check_copied(tensor.op)
            inner[id(tensor)] = tensor.op
            for part in tensor.op.inputs:
                if self.counts_rows(tensor.op) and self._is_count(part, tensor.op):
                    leaves[id(part)] = _Leaf(part, self._graph, is_count=True)
                else:
                    todo.append(part)
        return leaves, list({id(op): op for op in inner.values()}.values())

    def _is_leaf(self, tensor: Any) -> bool:
        if step_context.known_as(tensor):
            return True
        if self._graph.has_rows(tensor):
            return not self._mixes(tensor, 20)
        if self._graph.depends_on_rows(tensor):
            return False
        return self._graph.is_read(tensor)

    def _mixes(self, tensor: Any, depth: int) -> bool:
        """Tell whether a tensor with rows has scalars in it that depend on all rows.

        An example is `losses / tf.shape(losses)[0]`.
        """
        if tensor.op.type not in _ELEMENTWISE | _BRANCHES or not depth:
            return False
        return self.counts_rows(tensor.op) or any(
            self._mixes(part, depth - 1)
            if self._graph.has_rows(part)
            else self._graph.depends_on_rows(part) and part.dtype.is_floating
            for part in tensor.op.inputs
        )


class _Leaf:
    """A tensor that is replaced by random numbers."""

    def __init__(self, tensor: Any, graph: RowGraph, *, is_count: bool = False) -> None:
        self.tensor = tensor
        self.is_count = is_count
        self.known_as = step_context.known_as(tensor)
        self.has_rows = self.known_as is None and graph.has_rows(tensor)
        if tensor.shape.rank is None or not (
            tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
        ):
            raise Undecided(
                f"because of a tensor of {tensor.dtype.name}, shape {tensor.shape}"
            )
        shape: list[int | None] = list(tensor.shape)
        self.axis = shape.index(None) if None in shape else 0
        self.shape = [3 if n is None else n for n in shape]
        rows = _SELECTED if _is_selection(tensor) else _ROWS
        self.sizes = [n for (n,) in rows]
        if self.has_rows and np.prod(self.shape, dtype=float) * 5 > _MOST_NUMBERS:
            raise Undecided(
                f"because of a tensor of shape {tensor.shape} is too large to try"
            )

    def spec(self) -> Any:
        """Return the spec of the numbers: the number of rows is open."""
        shape = list(self.tensor.shape)
        if self.has_rows:
            shape[self.axis] = None
        return tf.TensorSpec(shape, self.tensor.dtype)

    def values(self, random: Any) -> list[Any]:
        """Numbers for the first rows, for the second rows, and for both."""
        if self.is_count:
            return [self._cast(n) for n in (2, 3, 5)]
        if not self.has_rows:
            one, two = random.uniform(0.2, 2, 2)
            if self.known_as != "mean":
                one = two = 1 if self.tensor.dtype.is_integer else one
            both = (2 * one + 3 * two) / 5
            return [self._cast(np.full(self.shape, v)) for v in (one, two, both)]
        blocks = []
        for rows in self.sizes:
            shape = list(self.shape)
            shape[self.axis] = rows
            scale = random.uniform(0.2, 2)
            block = random.uniform(0.1, 1, shape) * scale
            if not self.tensor.dtype.is_floating:
                block = random.uniform(0, 1, shape) < 0.3 + 0.3 * scale
            blocks.append(block)
        return [self._cast(v) for v in (*blocks, np.concatenate(blocks, self.axis))]

    def _cast(self, values: Any) -> Any:
        return tf.cast(tf.constant(np.asarray(values)), self.tensor.dtype)


def _numbers(leaves: dict[int, _Leaf], seed: int) -> Iterable[tuple[Any, ...]]:
    random = np.random.default_rng(seed)
    with tf.init_scope(), tf.device("CPU"):
        return list(
            zip(*(leaf.values(random) for leaf in leaves.values()), strict=True)
        )


def _function(scalar: Any, leaves: dict[int, _Leaf], inner: list[Any]) -> Any:
    """A function of the numbers that computes the scalar as its graph does."""
    names = {id(leaf.tensor): f"leaf{i}" for i, leaf in enumerate(leaves.values())}
    graph = tf.compat.v1.GraphDef()
    if any(_functions_of(op) for op in inner):
        graph.library.CopyFrom(scalar.graph.as_graph_def().library)
    for leaf in leaves.values():
        node = graph.node.add(name=names[id(leaf.tensor)], op="Placeholder")
        node.attr["dtype"].type = leaf.tensor.dtype.as_datatype_enum
    for op in inner:
        node = graph.node.add()
        node.CopyFrom(op.node_def)
        node.device = ""
        node.attr.pop("_class", None)
        del node.input[:]
        node.input.extend(names.get(id(t), t.name) for t in op.inputs)

    def compute(*values: Any) -> Any:
        given = {f"{n}:0": v for n, v in zip(names.values(), values, strict=True)}
        [result] = tf.graph_util.import_graph_def(
            graph, input_map=given, return_elements=[scalar.name]
        )
        return tf.cast(result, tf.float64)

    specs = [leaf.spec() for leaf in leaves.values()]
    function: Any = None

    def run(*values: Any) -> float:
        try:
            with tf.init_scope(), tf.device("CPU"):
                nonlocal function
                # `tf.function` would warn of being traced often.
                function = function or tf.compat.v1.wrap_function(compute, specs)
                return float(function(*values))
        except (tf.errors.OpError, ValueError) as error:
            raise Undecided(_cause(error)) from error

    return run


def _copy(op: Any, inputs: list[Any]) -> list[Any]:
    """Add an operation to its graph again, with other inputs."""
    attributes = {k: v for k, v in op.node_def.attr.items() if k != "_class"}
    dtypes = [output.dtype for output in op.outputs]
    made = op.graph.create_op(op.type, inputs, dtypes, attrs=attributes).outputs
    for one, other in zip(op.outputs, made, strict=True):
        other.set_shape(one.shape)
    return list(made)


def _kind(values: list[float], *, half: bool) -> Kind:
    one, two, both = values
    near = (3e-2 if half else 1e-3) * max(map(abs, values))
    is_mean = abs(both - (2 * one + 3 * two) / 5) <= near
    is_sum = abs(both - (one + two)) <= near
    if is_mean == is_sum or not np.isfinite(values).all():
        return Kind.MEAN if is_mean and not any(values) else Kind.OTHER
    return Kind.MEAN if is_mean else Kind.SUM


def _cause(error: Exception) -> str:
    """Explain why a scalar cannot be tried: which operation fails for other rows."""
    if found := re.search(r"\{\{node (?:import/)?([\w/]+)\}\}", str(error)):
        return (
            f"because its operation {found[1]!r} does not work on another number of "
            "rows (a constant in it, such as the batch size?)"
        )
    return f"because of a {type(error).__name__}"


def _check_copied(op: Any) -> None:
    """Raise if an operation cannot be run by itself."""
    if is_input(op.outputs[0]):
        raise Undecided(f"because of the operation {op.type}")


def _functions_of(op: Any) -> list[str]:
    """List the functions that an operation without state calls."""
    attributes = op.node_def.attr.values()
    return [a.func.name for a in attributes if a.HasField("func")]


def _is_selection(tensor: Any) -> bool:
    """Tell whether rows were selected by a mask, which changes their number."""
    for _ in range(10):
        kind = tensor.op.type
        if kind in ("Where", "DynamicPartition", "Unique"):
            return True
        if kind in ("GatherV2", "GatherNd", "ResourceGather"):
            tensor = tensor.op.inputs[1]
        elif kind in _ELEMENTWISE | {"Exp", "Log", "Sqrt", "Abs", "Relu"}:
            tensor = tensor.op.inputs[0]
        else:
            return False
    return False
