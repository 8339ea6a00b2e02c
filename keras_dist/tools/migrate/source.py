"""One file: its tree, the rules in their order, and the new text."""

import ast
import sys
import warnings
from collections.abc import Callable
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keras_dist.tools.migrate import (
    calls,
    gone,
    imports,
    moved,
    optimizers,
    rate,
    sessions,
    symbolic,
)
from keras_dist.tools.migrate.report import Finding, Migrated
from keras_dist.tools.migrate.script import Script
from keras_dist.tools.migrate.weight_files import WeightFiles, with_text

# For each kind of node, what is tried on it, in this order. A rule gets the node as it
# was, the node with what has changed inside of it, and the script.
_RULES: dict[type, tuple[Callable[..., Any], ...]] = {
    cst.Import: (gone.list_import, imports.change_import),
    cst.ImportFrom: (
        gone.list_import,
        optimizers.change_legacy_import,
        moved.change_import,
        imports.change_from,
    ),
    cst.Attribute: (
        imports.change_name,
        optimizers.change_legacy_name,
        rate.change_attribute,
        sessions.change_name,
        gone.list_name,
        gone.list_member,
    ),
    cst.Name: (gone.list_star_name,),
    cst.ClassDef: (gone.list_method,),
    cst.Call: (
        imports.change_text,
        optimizers.change_optimizer,
        optimizers.change_variables,
        gone.list_arguments,
        symbolic.list_operation,
        calls.change_compile,
        calls.change_generator,
        calls.change_loaders,
        calls.change_embedding,
        calls.change_weight,
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, for example
            ast.parse(source)  # its messages are better, and no text crashes it
        module = cst.parse_module(source)
    except (SyntaxError, cst.ParserSyntaxError, ValueError, RecursionError) as error:
        return Migrated(source, (_unreadable(error),))
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    script = Script(module, _Lazy(wrapper))
    if not script.names.uses_keras():
        imports.note_plain(script)
        return Migrated(source, tuple(script.findings))
    files = WeightFiles(script)
    blocks = sessions.Blocks(script)
    try:
        changed = module.visit(_Rewrite(script, files, blocks))
    except RecursionError as error:
        return Migrated(source, (_unreadable(error),))
    changed = imports.added(changed, script)
    findings = tuple(sorted(set(script.findings)))
    if changed.bytes == module.bytes:
        return Migrated(source, findings)
    if module.bytes != source:
        reason = "libcst would change other lines, too: white space is lost"
        advice = "Remove a form feed at the beginning of a line, or lines' ends by CR"
        return Migrated(source, (Finding(1, reason, advice), *findings))
    return Migrated(changed.bytes, findings)


def _unreadable(error: Exception) -> Finding:
    """Why a file cannot be read."""
    if isinstance(error, RecursionError):
        advice = "Write it in several statements"
        return Finding(1, "an expression is nested too deeply to be read", advice)
    line = getattr(error, "lineno", None) or getattr(error, "raw_line", None)
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    text = getattr(error, "msg", None) or str(error).splitlines()[0]
    advice = "Mend it first; 2to3 does so, if it is Python 2"
    return Finding(line or 1, f"{version} cannot read this file ({text})", advice)


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
