"""One file: its tree, the rules in their order, and the new text."""

import ast
import sys
import warnings
from collections.abc import Callable
from typing import Any

import libcst as cst

from keras_dist.tools.migrate import calls, gone, imports, sessions
from keras_dist.tools.migrate.command import Finding, Migrated
from keras_dist.tools.migrate.script import Script
from keras_dist.tools.migrate.weight_files import WeightFiles, with_text

# For each kind of node, the rules that change it, in this order. A rule takes the node
# as it was, the node with what has changed in it, and the script.
_CHANGES: dict[type, tuple[Callable[..., Any], ...]] = {
    cst.Import: (imports.change_import,),
    cst.ImportFrom: (
        calls.change_legacy_import,
        imports.change_private,
        imports.change_from,
    ),
    cst.Attribute: (
        imports.change_name,
        calls.change_legacy_name,
        calls.change_rate,
        sessions.change_name,
    ),
    cst.Call: (
        imports.change_text,
        calls.change_optimizer,
        calls.change_variables,
        gone.list_arguments,
        calls.change_compile,
        calls.change_generator,
        calls.change_loaders,
        calls.change_embedding,
        calls.change_weight,
        calls.change_checkpoint,
        calls.change_rate_text,
        calls.change_rate_call,
    ),
    cst.Expr: (calls.change_rate_statement,),
}

# And the rules that only list what a person has to change. They take node and script.
_LISTS: dict[type, tuple[Callable[..., None], ...]] = {
    cst.Import: (gone.list_import,),
    cst.ImportFrom: (gone.list_import,),
    cst.Attribute: (gone.list_name, gone.list_member),
    cst.Name: (gone.list_star_name,),
    cst.ClassDef: (gone.list_method,),
    cst.Call: (gone.list_operation,),
    cst.SimpleString: (calls.list_flag,),
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
    script = Script(module)
    if not script.names.uses_keras():
        imports.note_plain(script)
        return Migrated(source, tuple(script.findings))
    files = WeightFiles(script)
    lines = sessions.SessionLines(script)
    try:
        changed = module.visit(_Rewrite(script, files, lines))
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
    """Say why a file cannot be read."""
    if isinstance(error, RecursionError):
        advice = "Write it in several statements"
        return Finding(1, "an expression is nested too deeply to be read", advice)
    line = getattr(error, "lineno", None) or getattr(error, "raw_line", None)
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    text = getattr(error, "msg", None) or str(error).splitlines()[0]
    advice = "Mend it first; 2to3 does so, if it is Python 2"
    return Finding(line or 1, f"{version} cannot read this file ({text})", advice)


class _Rewrite(cst.CSTTransformer):
    """Apply all rules in one pass, from the inside of each statement out."""

    def __init__(
        self, script: Script, files: WeightFiles, lines: sessions.SessionLines
    ):
        super().__init__()
        self._script = script
        self._texts, self._names = files.changes()
        self._lines = lines

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
        for list_gone in _LISTS.get(type(original), ()):
            list_gone(original, self._script)
        for change in _CHANGES.get(type(original), ()):
            if type(updated) is type(original):
                updated = change(original, updated, self._script)
        if isinstance(original, (cst.Module, cst.IndentedBlock)):
            return self._lines.change(original, updated)
        return updated
