"""One file: its tree, the rules in their order, and the new text."""

from collections.abc import Callable
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keras_dist.migrate import calls, imports, moved, optimizers, rate, sessions
from keras_dist.migrate.report import Finding, Migrated
from keras_dist.migrate.script import Script
from keras_dist.migrate.weight_files import WeightFiles, with_text

# For each kind of node, what is tried on it, in this order. A rule gets the node as it
# was, the node with what has changed inside of it, and the script.
_RULES: dict[type, tuple[Callable[..., Any], ...]] = {
    cst.Import: (imports.change_import,),
    cst.ImportFrom: (
        optimizers.change_legacy_import,
        moved.change_import,
        imports.change_from,
    ),
    cst.Attribute: (
        imports.change_name,
        optimizers.change_legacy_name,
        rate.change_attribute,
        sessions.change_name,
        moved.list_name,
    ),
    cst.Call: (
        imports.change_text,
        optimizers.change_optimizer,
        optimizers.change_variables,
        calls.change_compile,
        calls.change_generator,
        calls.change_loaders,
        calls.change_embedding,
        calls.change_checkpoint,
        rate.change_text,
        rate.change_call,
    ),
    cst.Expr: (rate.change_statement,),
    cst.SimpleString: (calls.change_flag,),
}


def migrate(source: bytes) -> Migrated:
    """Rewrite a script for Horovod and Keras 2 to one for keras_dist and Keras 3.

    Args:
        source: The text of a Python file.

    Returns:
        The new text, which is the old one where there is nothing to change, and what a
        person has to change.
    """
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        reason = f"this is not Python 3 ({error.message.splitlines()[0]})"
        advice = "Run 2to3 on it first, if it is Python 2"
        return Migrated(source, (Finding(error.raw_line, reason, advice),))
    except UnicodeDecodeError as error:
        reason = f"the file is not text ({error})"
        return Migrated(source, (Finding(1, reason, "Save it as UTF-8"),))
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    script = Script(module, _Lazy(wrapper))
    if not script.names.uses_keras():
        imports.note_plain(script)
        return Migrated(source, tuple(script.findings))
    files = WeightFiles(script)
    blocks = sessions.Blocks(script)
    changed = module.visit(_Rewrite(script, files, blocks))
    changed = imports.added(changed, script)
    findings = tuple(sorted(set(script.findings)))
    return Migrated(changed.bytes, findings)


class _Lazy(dict[cst.CSTNode, Any]):
    """Positions of nodes, which are computed when the first is asked for."""

    def __init__(self, wrapper: MetadataWrapper):
        super().__init__()
        self._wrapper = wrapper

    def get(self, node: cst.CSTNode, default: Any = None) -> Any:
        """The position of a node."""
        return self._wrapper.resolve(PositionProvider).get(node, default)


class _Rewrite(cst.CSTTransformer):
    """Applies all rules in one pass, from the inside of each statement out."""

    def __init__(self, script: Script, files: WeightFiles, blocks: sessions.Blocks):
        super().__init__()
        self._script = script
        self._texts, self._names = files.changes()
        self._blocks = blocks

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Try the rules for this kind of node."""
        original: Any = original_node
        updated: Any = super().on_leave(original_node, updated_node)
        if original in self._texts:
            return with_text(updated, self._texts[original])
        if isinstance(original, cst.SimpleString) and not original.prefix:
            new = self._names.get(str(original.evaluated_value))
            if new is not None:
                return with_text(updated, new)
        for rule in _RULES.get(type(original), ()):
            if type(updated) is type(original):
                updated = rule(original, updated, self._script)
        if isinstance(original, (cst.Module, cst.IndentedBlock)):
            return self._blocks.change(original, updated)
        return updated
