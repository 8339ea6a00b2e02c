"""A rank's batch in pieces: gradients are added up, so that less memory is needed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.optimizer import (
    Recorded,
    leaves,
    of_piece,
    of_pieces,
    optimizers_of,
    step_context,
    variables_of,
)
from keras_dist.optimizer.replaced_methods import replaced_methods
from keras_dist.optimizer.step_context import known_as, own_variable
from keras_dist.training.build import all_variables, restoring_generators
from keras_dist.training.loss_kind import num_rows
from keras_dist.training.stray_variables import assignments, dtype_of, handles_of

# Operations that have a state, and do not change it.
_READS = {"ReadVariableOp", "ResourceGather", "Placeholder"}

_MOST_SUMS = 64

# How the types of operations begin that may change something beside variables.
_LASTING = ("PyFunc", "EagerPyFunc", "Write", "QueueEnqueue", "LookupTable", "Save")
_LASTING_READS = ("PyFuncStateless", "LookupTableFind", "LookupTableSize")


def make_sums() -> tf.Variable:
    """Make the variable for sums over the pieces of a step, outside of any graph."""
    with tf.init_scope():
        return own_variable(tf.zeros([_MOST_SUMS], tf.float64))


@dataclass
class PieceTrace:
    """Findings of one run of the model's own step on a piece, in a graph or not.

    Args:
        graph: The graph in which it was traced; `None` if it ran eagerly.
        calls: The recorded calls of `apply`; one, after it was checked.
        sums: Scalars of a piece of which the step needs the sum over all pieces.
        in_layers: Identities of the handles of variables that calls of layers change.
        logs: What the step returned.
        are_means: For each value in `logs`, whether it is of this piece; otherwise it
            is the result of a metric, which has seen all pieces so far.
        gradients: One for each variable: a tensor, values and indices, or `None`.
    """

    graph: Any
    calls: list[Recorded] = field(default_factory=list)
    sums: list[Any] = field(default_factory=list)
    in_layers: set[int] = field(default_factory=set)
    logs: Any = None
    are_means: list[bool] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)


class Pieces:
    """Computes the gradients of a batch in pieces, one after the other.

    To the losses, a piece is to a rank's batch what that is to the global batch: what
    is a mean over its rows counts in proportion to them, and sums are added up. So a
    loss of `add_loss` and a regularizer count once. Metrics see all pieces.

    Args:
        model: The model.
        own_step: Its own `train_step`; its variables must exist.
        microbatch: The most rows of a piece: a number, or a variable.
        is_of_rank: Whether losses are those of this rank's rows alone.
        sums: A variable for sums over all pieces (`make_sums`).
        function: Makes a function of tensors from a function of Python.
    """

    def __init__(
        self,
        model: Any,
        own_step: Callable[[Any], Any],
        *,
        microbatch: Any,
        is_of_rank: bool,
        sums: Any,
        function: Callable[[Any], Any],
    ) -> None:
        self._model = model
        self._own_step = own_step
        self._microbatch = microbatch
        self._is_of_rank = is_of_rank
        self._sums = sums
        self._traces: dict[int, PieceTrace] = {}
        self._traced: PieceTrace | None = None
        self.compute_piece = function(self._record)

    def specs(self, data: Any) -> tuple[Any, Any]:
        """Return the specs of the arguments of `compute_piece`: a piece, and counts."""
        _Cut(data, self._microbatch)  # raises an error if it cannot be cut
        piece = keras.tree.map_structure(_spec_of, data)
        counts = [
            tf.TensorSpec(c.shape, c.dtype) if tf.is_tensor(c) else c
            for c in self._counts(data)
        ]
        return piece, counts

    def trace(self, specs: tuple[Any, Any]) -> PieceTrace:
        """Trace the step for a piece, without running it.

        Raises:
            ValueError: If the step cannot be computed in pieces.
        """
        if not tf.executing_eagerly():
            concrete = self.compute_piece.get_concrete_function(*specs)
            return self._traces[id(concrete.graph)]
        try:
            with restoring_generators():
                concrete = self.compute_piece.get_concrete_function(*specs)
        finally:
            private.clear_losses(self._model)  # of this graph
        return self._traces[id(concrete.graph)]

    def compute(
        self, data: Any, trace: PieceTrace, *, is_trial: bool = False
    ) -> tuple[Any, Recorded, list[Any]]:
        """Compute the gradients of a batch.

        Args:
            data: The batch.
            trace: The trace for the specs of such a batch.
            is_trial: Whether to leave out what needs the other ranks.

        Returns:
            The logs of the step, the call of `apply` that it makes, and the gradients.
        """
        cut, counts = _Cut(data, self._microbatch), self._counts(data)
        begin = _zeros(trace)
        if tf.executing_eagerly():
            state: Any = begin
            self._traced = trace
            for index in range(int(cut.number)):
                state = _added(trace, state, *self._record(cut.piece(index), counts))
            trace.calls = self._traces[0].calls
        else:
            self._set_sums(trace, cut, counts, is_trial=is_trial)

            def body(index: Any, state: Any) -> Any:
                own = self.compute_piece(cut.piece(index), counts)
                return index + 1, _added(trace, state, *own)

            _, state = tf.while_loop(
                lambda index, _: index < cut.number,
                body,
                (tf.constant(0, tf.int64), begin),
                shape_invariants=(tf.TensorShape([]), _invariants(trace)),
                # Otherwise all pieces may be in memory at the same time.
                parallel_iterations=1,
            )
        [call], (logs, gradients) = trace.calls, state
        whole = [
            _gradient(trace, gradient, like)
            for gradient, like in zip(gradients, call.gradients, strict=True)
        ]
        own = of_pieces(call.optimizer, whole, call.variables)
        return keras.tree.pack_sequence_as(trace.logs, logs), call, own

    def _counts(self, data: Any) -> list[Any]:
        """Rows of the batch; rows of all ranks; whether the batch is this rank's own.

        They are arguments of `compute_piece`, since what XLA compiles must not read
        them elsewhere.
        """
        context, length = step_context.current(), num_rows(data)
        if self._is_of_rank:
            return [length, length, None]
        total = context.rows_of_all
        if total is None and (tf.executing_eagerly() or self._model.run_eagerly):
            total = comm.total(tf.cast(context.rows, tf.int64), purpose="rows")
        return [length, total, context.has_rows]

    def _record(self, data: Any, counts: Any) -> Any:
        """Run the step on a piece, except for its update.

        Args:
            data: The piece.
            counts: See `_counts`.

        Returns:
            The values in the logs, and the gradients. Means over the piece's rows have
            been multiplied by the piece's fraction of the rank's batch.
        """
        length, rows_of_all, has_rows = counts
        rows = num_rows(data)
        is_eager = tf.executing_eagerly()
        graph = None if is_eager else tf.compat.v1.get_default_graph()
        trace = PieceTrace(graph)
        context = dataclasses.replace(
            step_context.current(),
            rows=rows if has_rows is None else tf.where(has_rows, rows, 0),
            length=rows if isinstance(rows, int) else None,
            rows_of_all=rows_of_all,
            has_rows=has_rows,
            recorded=trace.calls,
            sum_of_pieces=lambda value: self._sum(trace, value),
            is_of_rank=self._is_of_rank,
        )
        with step_context.entered(context):
            with contextlib.nullcontext() if is_eager else _noting_layers(trace):
                trace.logs = self._own_step(data)
            if not is_eager:
                self._check(trace)
            [call] = trace.calls
            own = of_piece(call.optimizer, call.gradients, call.variables)
        fraction = tf.cast(rows, tf.float64) / tf.cast(length, tf.float64)
        logs = [_tensor_or_none(leaf) for leaf in keras.tree.flatten(trace.logs)]
        if self._traced is not None:
            trace.are_means = self._traced.are_means
        else:
            metrics = _handles_by_id(graph, _metric_variables(self._model))
            trace.are_means = [_is_mean(leaf, metrics) for leaf in logs]
        logs = [
            leaf * tf.cast(fraction, leaf.dtype) if is_mean else leaf
            for leaf, is_mean in zip(logs, trace.are_means, strict=True)
        ]
        variables = variables_of(call.optimizer, call.variables)
        trace.gradients = [
            _weighted(gradient, fraction, tuple(variable.shape))
            for gradient, variable in zip(own, variables, strict=True)
        ]
        self._traces[0 if is_eager else id(graph)] = trace
        return logs, trace.gradients

    def _sum(self, trace: PieceTrace, value: Any) -> Any:
        """Read the sum over all pieces of a scalar of a piece from a variable."""
        if self._model.run_eagerly:
            self._refuse(
                "that runs eagerly, with a loss that is divided by a sum over rows "
                "(a mask, or weights)"
            )
        if len(trace.sums) == _MOST_SUMS:
            self._refuse(f"with more than {_MOST_SUMS} losses that are sums over rows")
        trace.sums.append(value)
        return tf.cast(self._sums.read_value()[len(trace.sums) - 1], value.dtype)

    def _set_sums(
        self, trace: PieceTrace, cut: "_Cut", counts: Any, *, is_trial: bool
    ) -> None:
        """Set the variable of `_sum`, by running of each piece what that needs."""
        if not trace.sums:
            return
        compute = self._copied(trace.sums, trace.graph)

        def body(index: Any, sums: Any) -> Any:
            return index + 1, sums + compute(cut.piece(index), counts)

        _, sums = tf.while_loop(
            lambda index, _: index < cut.number,
            body,
            (tf.constant(0, tf.int64), tf.zeros([len(trace.sums)], tf.float64)),
            parallel_iterations=1,
        )
        if not (self._is_of_rank or is_trial):
            sums = comm.total(sums, purpose="sums_of_pieces")
        self._sums.assign(tf.pad(sums, [[0, _MOST_SUMS - len(trace.sums)]]))

    def _copied(self, values: Sequence[Any], graph: Any) -> Callable[..., Any]:
        """Make a function that computes scalars of a graph, and nothing else of it."""
        captured = {id(inner): outer for outer, inner in graph.captures}
        arguments = [t for t in graph.inputs if id(t) not in captured]
        definition = tf.compat.v1.GraphDef()
        definition.library.CopyFrom(graph.as_graph_def().library)
        used: dict[str, Any] = {}
        todo = [value.op for value in values]
        while todo:
            op = todo.pop()
            if op.name in used:
                continue
            used[op.name] = op
            if op.op_def.is_stateful and op.type not in _READS:
                self._refuse(
                    "with a loss that is divided by a sum over rows, which depends on "
                    f"the operation {op.name!r} ({op.type})"
                )
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            node.device = ""
            node.attr.pop("_class", None)
            del node.input[:]  # without those that only have to be run before it
            node.input.extend(part.name for part in op.inputs)
            todo += [part.op for part in op.inputs]

        def compute(piece: Any, counts: Any) -> Any:
            flat = tf.nest.flatten((piece, counts), expand_composites=True)
            given = [leaf for leaf in flat if tf.is_tensor(leaf)]
            pairs = [*zip(arguments, given, strict=True)]
            pairs += [(inner, captured[id(inner)]) for _, inner in graph.captures]
            found = tf.graph_util.import_graph_def(
                definition,
                input_map={
                    inner.name: tf.identity(outer)
                    for inner, outer in pairs
                    if inner.op.name in used
                },
                return_elements=[value.name for value in values],
                name="",
            )
            return tf.stack([tf.cast(value, tf.float64) for value in found])

        return compute

    def _check(self, trace: PieceTrace) -> None:
        """Check that the step is the same, whether it is computed in pieces or not.

        Raises:
            ValueError: If it is not, or if that cannot be seen from its graph.
        """
        graph, calls = trace.graph, trace.calls
        if len(calls) != 1:
            self._refuse(f"that makes {len(calls) or 'no'} updates, not one")
        [call] = calls
        if call.graph is not graph:
            self._refuse("whose update is inside a function, a condition or a loop")
        operations = _operations_in(graph)
        if collective := next((o for o in operations if o.startswith("Horovod")), None):
            self._refuse(f"that communicates with other ranks ({collective})")
        lasting = next((o for o in operations if _is_lasting(o)), None)
        if lasting and isinstance(self._microbatch, tf.Variable):
            self._refuse(f"with an operation that cannot be taken back ({lasting})")
        self._check_changes(trace, call)

    def _check_changes(self, trace: PieceTrace, call: Recorded) -> None:
        """Check which variables the step changes, and which it reads at its end."""
        graph, model = trace.graph, self._model
        handles = handles_of(graph)
        own = {i for i, h in handles.items() if known_as(h) == "ours"}
        optimizers = optimizers_of(model)
        changed = [*model.trainable_variables]
        changed += variables_of(call.optimizer, call.variables)
        changed += [v for optimizer in optimizers for v in optimizer.variables]
        of_update = {_handle_id(variable) for variable in changed}
        metrics = {_handle_id(variable) for variable in _metric_variables(model)}
        summed = {
            _handle_id(variable)
            for variable in model.variables
            if getattr(variable, "aggregation", None) == "sum"
        }
        paths = {_handle_id(v): v.path for v in all_variables(model)}
        for _, handle in assignments(graph, _without(handles, own)):
            name = paths.get(id(handle), "a variable outside of the model")
            if id(handle) in of_update:
                self._refuse(f"that changes {name} without an optimizer")
            is_free = id(handle) in metrics or _is_of_generator(handle)
            if not is_free and id(handle) not in trace.in_layers:
                self._refuse(f"that itself changes {name}, outside of a layer")
            is_whole = dtype_of(handle) not in (tf.bool, *_FLOATING)
            if is_whole and not is_free and id(handle) not in summed:
                self._refuse(f"with a layer that counts its calls in {name}")
        rates = {
            _handle_id(private.rate_of(leaf))
            for optimizer in optimizers
            for leaf in leaves(optimizer)
        }
        for op in graph.get_operations()[call.num_before :]:
            for tensor in op.inputs:
                handle = id(handles.get(id(tensor)))
                if handle in of_update - rates:
                    name = paths.get(handle, "a variable")
                    self._refuse(f"that reads {name} after the update")

    def _refuse(self, reason: str) -> NoReturn:
        is_auto = isinstance(self._microbatch, tf.Variable)
        received = '"auto"' if is_auto else self._microbatch
        raise ValueError(
            "`microbatch` needs a train step that makes one update, by an optimizer, "
            "at its end, and changes nothing else that a piece must not change. "
            f"Received: microbatch={received} and a train step of "
            f"{type(self._model).__name__} {reason}. Leave out `microbatch`; a smaller "
            "`batch_size` with `gradient_accumulation_steps` of Keras's optimizers "
            "needs less memory, too."
        )


class _Cut:
    """Cut of a batch into pieces of nearly the same number of rows.

    Args:
        data: The batch.
        microbatch: The most rows of a piece: a number, or a variable.

    Raises:
        ValueError: If not all arrays of the batch have a value for each row.
    """

    def __init__(self, data: Any, microbatch: Any) -> None:
        self._data = data
        rows = num_rows(data)
        rows = tf.cast(rows, tf.int64) if tf.is_tensor(rows) else rows
        self.rows = rows
        if isinstance(microbatch, tf.Variable):
            microbatch = microbatch.read_value()
        self.number = -(-rows // microbatch)
        for leaf in keras.tree.flatten(data):
            shape = getattr(leaf, "shape", None)
            known = shape[0] if shape is not None and shape.rank else None
            if isinstance(rows, int) and known not in (None, rows):
                shape = tuple(shape or ())
                raise ValueError(
                    "`microbatch` cuts all arrays of a batch into pieces of rows. "
                    f"Received: an array of shape {shape} in a batch of {rows} rows. "
                    "Leave out `microbatch`, or give each row its part of it."
                )

    def piece(self, index: Any) -> Any:
        """Return a piece; `index` is a number, or a scalar tensor of int64."""
        rows, number = (tf.cast(n, tf.int64) for n in (self.rows, self.number))
        index = tf.cast(index, tf.int64)
        begin, end = index * rows // number, (index + 1) * rows // number
        return keras.tree.map_structure(
            lambda leaf: self._part(leaf, begin, end), self._data
        )

    def _part(self, leaf: Any, begin: Any, end: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            shape = leaf.dense_shape
            first = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
            return tf.sparse.slice(
                leaf, first, tf.concat([[end - begin], shape[1:]], 0)
            )
        if isinstance(leaf, tf.RaggedTensor):
            length = leaf.nrows(tf.int64)
        else:
            length = tf.shape(leaf, tf.int64)[0]
        is_whole = tf.debugging.assert_equal(
            length,
            tf.cast(self.rows, tf.int64),
            "`microbatch` cuts all arrays of a batch into pieces of rows. This one has "
            "another number of rows than the batch.",
        )
        with tf.control_dependencies([] if is_whole is None else [is_whole]):
            part = leaf[begin:end]
        return part


_FLOATING = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def _spec_of(leaf: Any) -> Any:
    """Return the spec of a piece of a tensor: its number of rows is open.

    A graph with a constant in its place may not show what is a sum over rows.
    """
    if leaf is None or leaf.shape.rank == 0:
        return leaf if leaf is None else tf.TensorSpec([], leaf.dtype)
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        ranks = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *ranks)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    if leaf.shape.rank is None:
        return tf.TensorSpec(None, leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _tensor_or_none(leaf: Any) -> Any:
    return None if leaf is None else tf.convert_to_tensor(leaf)


def _weighted(gradient: Any, fraction: Any, shape: tuple[int, ...]) -> Any:
    """Multiply a gradient by a fraction, in at least 32 bits.

    Args:
        gradient: Of a piece.
        fraction: A scalar tensor.
        shape: The shape of the variable.

    Returns:
        A tensor; values and indices of `tf.IndexedSlices`; or `None`.
    """
    if gradient is None:
        return None
    is_rows = isinstance(gradient, tf.IndexedSlices)
    value = gradient.values if is_rows else tf.convert_to_tensor(gradient)
    wide = tf.float32 if value.dtype in (tf.float16, tf.bfloat16) else value.dtype
    value = tf.cast(value, wide) * tf.cast(fraction, wide)
    value = tf.ensure_shape(value, [None, *shape[1:]] if is_rows else shape)
    return (value, gradient.indices) if is_rows else value


def _zeros(trace: PieceTrace) -> Any:
    """Return logs and gradients of no piece; values of unknown length are empty."""

    def zeros(like: Any, *, is_empty: bool = False) -> Any:
        shape = [0 if n is None else n for n in like.shape]
        return tf.zeros([0, *shape[1:]] if is_empty else shape, like.dtype)

    logs = [_tensor_or_none(leaf) for leaf in keras.tree.flatten(trace.logs)]
    return (
        [None if leaf is None else zeros(leaf) for leaf in logs],
        [
            tuple(zeros(part, is_empty=True) for part in gradient)
            if isinstance(gradient, tuple)
            else None
            if gradient is None
            else zeros(gradient)
            for gradient in trace.gradients
        ],
    )


def _invariants(trace: PieceTrace) -> Any:
    """Return the shapes of `_zeros` after any number of pieces."""
    logs = [_tensor_or_none(leaf) for leaf in keras.tree.flatten(trace.logs)]
    return (
        [None if leaf is None else leaf.shape for leaf in logs],
        [
            tuple(tf.TensorShape([None, *part.shape[1:]]) for part in gradient)
            if isinstance(gradient, tuple)
            else None
            if gradient is None
            else gradient.shape
            for gradient in trace.gradients
        ],
    )


def _added(trace: PieceTrace, state: Any, logs: Any, gradients: Any) -> Any:
    """Add logs and gradients of a piece to those of the pieces before it."""
    logs = [
        before + leaf if is_mean else leaf
        for before, leaf, is_mean in zip(state[0], logs, trace.are_means, strict=True)
    ]
    added: list[Any] = []
    for before, gradient in zip(state[1], gradients, strict=True):
        if isinstance(before, tuple):
            pairs = zip(before, gradient, strict=True)
            added.append(tuple(tf.concat(pair, 0) for pair in pairs))
        else:
            added.append(None if before is None else before + gradient)
    return logs, added


def _gradient(trace: PieceTrace, gradient: Any, like: Any) -> Any:
    """Return a gradient in the form and dtype that the step gave to `apply`."""
    if gradient is None:
        return None
    if isinstance(gradient, tuple):
        values, indices = gradient
        return tf.IndexedSlices(tf.cast(values, like.dtype), indices)
    return tf.cast(gradient, like.dtype)


@contextlib.contextmanager
def _noting_layers(trace: PieceTrace) -> Iterator[None]:
    """Inside the block, note which variables are changed in calls of layers."""
    depth = 0

    def call(plain: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth or tf.executing_eagerly():
            return plain(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        depth += 1
        try:
            return plain(*args, **kwargs)
        finally:
            depth -= 1
            changes = assignments(graph, handles_of(graph), begin)
            trace.in_layers |= {id(handle) for _, handle in changes}

    with replaced_methods({(keras.layers.Layer, "__call__"): call}):
        yield


def _metric_variables(model: Any) -> list[Any]:
    found = [v for metric in model.metrics for v in metric.variables]
    for layer in private.layers_of(model):
        if isinstance(layer, keras.Model):
            found += layer.metrics_variables
    return found


def _handle_id(variable: Any) -> int:
    return id(getattr(getattr(variable, "value", variable), "handle", variable))


def _handles_by_id(graph: Any, variables: Sequence[Any]) -> set[int]:
    """Identities of the tensors that stand for some variables in a graph."""
    wanted = {_handle_id(variable) for variable in variables}
    return {inner for inner, h in handles_of(graph).items() if id(h) in wanted}


def _without(handles: dict[int, Any], left_out: set[int]) -> dict[int, Any]:
    return {inner: h for inner, h in handles.items() if inner not in left_out}


def _is_of_generator(handle: Any) -> bool:
    """Tell whether a variable is the state of a random generator of Keras or TF."""
    variable = private.type_of_handle(handle)
    shape = [dim.size for dim in variable.shape.dim]
    return shape in ([2], [3]) and tf.as_dtype(variable.dtype).is_integer


def _is_mean(leaf: Any, metrics: set[int]) -> bool:
    """Tell whether a value in the logs is of one piece, not of a metric's state."""
    is_number = leaf is not None and leaf.dtype.is_floating
    return is_number and not _reaches(leaf, metrics)


def _reaches(tensor: Any, ends: set[int]) -> bool:
    """Tell whether a tensor is computed from one of some others."""
    seen: set[int] = set()
    todo = [tensor]
    while todo:
        current = todo.pop()
        if id(current) in ends:
            return True
        if id(current) not in seen:
            seen.add(id(current))
            todo += current.op.inputs
    return False


def _is_lasting(operation: str) -> bool:
    is_read = operation.startswith(_LASTING_READS)
    return operation.startswith(_LASTING) and not is_read


def _operations_in(graph: Any) -> list[str]:
    """List the types of the operations in a graph, and in its functions."""
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return [node.op for node in nodes]
