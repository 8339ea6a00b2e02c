"""Which data a script divides among the ranks, and whether `dist_fit` can do so."""

from collections.abc import Callable, Sequence

import libcst as cst
from libcst import matchers as m

from keras_dist.tools.migrate.arguments import keyword, literal, passed
from keras_dist.tools.migrate.names import inside
from keras_dist.tools.migrate.script import Script

# Methods of a `tf.data.Dataset` that give the same global batches, whether they are
# called on a rank's elements or on all: those of single elements, and of batches.
_OF_ELEMENTS = ("map", "cache", "prefetch", "with_options", "shuffle", "batch")
_OF_BATCHES = ("map", "cache", "prefetch", "with_options")


class Data:
    """The data of one `fit`, and the shards in it.

    Args:
        script: The file.
        is_call: Whether a node is a call of a name, such as "hvd.size".
    """

    def __init__(
        self, script: Script, is_call: Callable[[cst.CSTNode | None, str], bool]
    ):
        self.shards: set[cst.CSTNode] = set()
        self.reasons: list[tuple[cst.CSTNode, str]] = []
        self._script = script
        self._is_call = is_call
        self._all = {one for one in script.nodes if self.is_shard(one)}
        self._known: dict[cst.CSTNode, bool] = {}
        self._fit: cst.CSTNode = script.module
        self._read: set[cst.CSTNode] = set()

    def look(self, fit: cst.Call) -> bool:
        """Return whether the data is sharded; what stands in the way is in `reasons`.

        Args:
            fit: The call of `fit`.
        """
        if not self._all:
            return False
        self._fit = fit
        training = self._are_sharded(
            [passed(fit, "x", 0), passed(fit, "y", 1)], "of x and y"
        )
        validation = self._are_sharded(
            _arrays_of(passed(fit, "validation_data", 7)), "of the validation data"
        )
        self._check(fit, bool(training), validation)
        for node in self._all:
            if node not in self.shards:
                reason = (
                    "a rank's part of some data is used for something else than fit"
                )
                self.reasons.append((node, reason))
        self._check_reads()
        return bool(training)

    def _check(self, fit: cst.Call, is_sharded: bool, validation: bool | None) -> None:
        """What `dist_fit` reads otherwise, if it divides the data itself."""
        if validation and not is_sharded:
            reason = "only validation data is sharded, and dist_fit would shard all"
            self.reasons.append((fit, reason))
        if not is_sharded:
            return
        split, steps = (
            keyword(fit, "validation_split"),
            keyword(fit, "validation_steps"),
        )
        if split is not None and literal(split.value) != 0:
            reason = (
                "validation_split takes the end of each rank's rows here, and of all "
            )
            self.reasons.append((fit, f"{reason}rows with dist_fit"))
        has_steps = steps is not None and literal(steps.value) is not None
        if has_steps and passed(fit, "validation_data", 7) and not validation:
            reason = "each rank reads the same validation_steps batches here, and with "
            self.reasons.append((fit, f"{reason}dist_fit each rank others"))

    def is_shard(self, node: cst.CSTNode) -> bool:
        """Whether this is the part of some data that a rank reads."""
        if isinstance(node, cst.Call):
            values: list[cst.CSTNode | None] = [arg.value for arg in node.args]
            is_method = m.matches(node.func, m.Attribute(attr=m.Name("shard")))
        elif isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            is_method = isinstance(index, cst.Slice) and index.upper is None
            values = [index.step, index.lower] if isinstance(index, cst.Slice) else []
        else:
            return False
        names = ["hvd.size", "hvd.rank"]
        is_ours = len(values) == 2 and all(map(self._is_call, values, names))
        return is_method and is_ours

    def _depends(self, node: cst.CSTNode) -> bool:
        """Whether a rank's part of the data is in an expression, in whatever way.

        What `fit` returns is of all ranks, by the `MetricAverageCallback`.
        """
        if node not in self._known:
            self._known[node] = self._reaches_shard(node)
        return self._known[node]

    def _reaches_shard(self, node: cst.CSTNode) -> bool:
        stack, seen = [node], set()
        while stack:
            found = stack.pop()
            is_new = found not in seen and found is not self._fit
            seen.add(found)
            if not is_new:
                continue
            if found in self._all:
                return True
            stack += inside(found)
            if isinstance(found, cst.Name) and self._script.is_read(found):
                values = self._script.values_at(found.value, found)
                stack += [value for value in values if value is not None]
        return False

    def _are_sharded(
        self, nodes: Sequence[cst.BaseExpression | None], what: str
    ) -> bool | None:
        """Whether all are; a reason where some are, or where it is not known."""
        found = [(one, self._is_sharded(one)) for one in nodes if one is not None]
        kinds = {kind for _, kind in found}
        for node, kind in found:
            if kind is None:
                self.reasons.append(
                    (node, "how this data is sharded is not understood")
                )
        if None not in kinds and len(kinds) > 1:
            self.reasons.append((found[0][0], f"only a part {what} is sharded"))
        return True in kinds

    def _is_sharded(self, node: cst.BaseExpression, depth: int = 0) -> bool | None:
        """Whether an expression is a rank's part; `None` if this is not understood."""
        if not self._depends(node):
            return False
        if depth > 8:
            return None
        if self.is_shard(node):
            inner = _operand(node)
            if self._is_sharded(inner, depth + 1) is not False:
                return None
            self.shards.add(node)
            return True
        if isinstance(node, cst.Name):
            values = self._script.values_at(node.value, node)
            self._read.add(node)
            # A shard that is unpacked is not reached, and so a reason by itself.
            kinds = {v is not None and self._is_sharded(v, depth + 1) for v in values}
            return kinds.pop() if len(kinds) == 1 else None
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            return self._is_chain_sharded(node, depth)
        return None

    def _is_chain_sharded(self, node: cst.Call, depth: int) -> bool | None:
        """`data.shard(…).map(f).batch(32)`."""
        func = cst.ensure_type(node.func, cst.Attribute)
        method, inner = func.attr.value, func.value
        is_batched = self._is_batched(inner)
        allowed = _OF_BATCHES if is_batched else _OF_ELEMENTS
        # A seed gives an order of its own, and a dropped remainder another one.
        is_plain = method not in ("shuffle", "batch") or len(node.args) == 1
        if method not in allowed or not is_plain:
            return None
        if any(self._depends(arg.value) for arg in node.args):
            return None
        return self._is_sharded(inner, depth + 1)

    def _is_batched(self, node: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether `batch` is called in what a chain begins with, behind the shard."""
        if depth > 8 or self.is_shard(node):
            return False
        if isinstance(node, cst.Name):
            values = self._script.values_at(node.value, node)
            return any(v is not None and self._is_batched(v, depth + 1) for v in values)
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return False
        is_batch = node.func.attr.value == "batch"
        return is_batch or self._is_batched(node.func.value, depth + 1)

    def _check_reads(self) -> None:
        """No name of sharded data is read elsewhere, where it is no shard then."""
        for name in self._script.assigned():
            values = self._script.values(name)
            if not any(value is not None and self._depends(value) for value in values):
                continue
            for node in self._script.reads(name):
                reaching = self._script.values_at(name, node)
                is_part = any(v is not None and self._depends(v) for v in reaching)
                if node not in self._read and is_part:
                    reason = (
                        f"{name} is a rank's part here, and all of it with dist_fit"
                    )
                    self.reasons.append((node, reason))


def _operand(node: cst.CSTNode) -> cst.BaseExpression:
    """The data of which a shard is taken."""
    if isinstance(node, cst.Subscript):
        return node.value
    func = cst.ensure_type(cst.ensure_type(node, cst.Call).func, cst.Attribute)
    return func.value


def _arrays_of(node: cst.BaseExpression | None) -> list[cst.BaseExpression | None]:
    """The arrays of validation data."""
    if isinstance(node, cst.Tuple):
        return [one.value for one in node.elements]
    return [node]
