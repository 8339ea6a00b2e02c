"""Parts of pages that are made from the code when the site is built.

A page holds `<!-- generated: NAME -->` where the text of the function NAME belongs.
"""

import argparse
import collections.abc
import inspect
import json
import os
import re
import textwrap
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import keras

import keras_dist
from keras_dist import __main__ as command
from keras_dist.setup.arguments import Options

# An argument, or several that go on in a deeper line, and a text in deeper lines.
_ARGUMENT = re.compile(
    r"^ {4}([\w*]+(?:,\s+[\w*]+)*): (.*\n(?: {8}.*\n)*)", re.MULTILINE
)
_MARK = re.compile(r"<!-- generated: (\w+) -->")

# What `make matrix` writes.
TRIED = "reference/versions.json"

# Where each option of `dist_fit` is explained, from docs/reference/.
PAGES = {
    "batch": "../concepts/batch.md",
    "lr_scaling": "../how_to/learning_rate.md",
    "warmup_epochs": "../how_to/learning_rate.md",
    "steps_scaling": "../how_to/learning_rate.md",
    "validation_steps_scaling": "../how_to/learning_rate.md",
    "batch_norm": "../concepts/batch.md",
    "shard": "../concepts/batch.md",
    "target_accuracy": "../how_to/learning_rate.md",
    "resume": "../how_to/resume.md",
    "save_steps": "../how_to/resume.md",
    "save_seconds": "../how_to/resume.md",
}


def keras_arguments() -> str:
    """The arguments of `Model.fit`, as a table."""
    hints = typing.get_type_hints(keras_dist.dist_fit)
    _, *items = inspect.signature(keras.Model.fit).parameters.values()
    rows = [
        f"| `{item.name}` | {in_words(hints[item.name])} | `{shown(item.default)}` |"
        for item in items
    ]
    return "\n".join(["| argument | type | default |", "|---|---|---|", *rows])


def options() -> str:
    """The keyword arguments that only `dist_fit` has, each with what it does."""
    hints = typing.get_type_hints(keras_dist.dist_fit)
    described = arguments_of(inspect.getdoc(keras_dist.dist_fit) or "")
    sections = []
    for item in fields(Options):
        page = PAGES[item.name]
        title = page.rpartition("/")[2].removesuffix(".md").replace("_", " ")
        sections.append(
            f"### {item.name}\n\n{in_words(hints[item.name])}; default "
            f"`{shown(item.default)}`\n\n{described[item.name]} "
            f"More: [{title}]({page}).\n"
        )
    return "\n".join(sections)


def arguments_of(docstring: str) -> dict[str, str]:
    """The text of each argument in the section "Args" of a docstring."""
    section = docstring.split("Args:\n", 1)[1]
    found: dict[str, str] = {}
    for names, text in _ARGUMENT.findall(section.split("\n\n", 1)[0] + "\n"):
        for name in names.replace("\n", " ").split(","):
            found[name.strip().lstrip("*")] = " ".join(text.split())
    return found


def in_words(hint: Any) -> str:
    """A type as a reader knows it: its values, or what kind of object."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return ", ".join(f"`{shown(value)}`" for value in inner)
    if kind in (typing.Union, types.UnionType):
        return ", ".join(map(in_words, inner))
    if kind is collections.abc.Callable:
        taken = ", ".join(map(in_words, inner[0]))
        return f"function of {taken} to {in_words(inner[1])}"
    if kind in (collections.abc.Sequence, list):
        return f"list of {in_words(inner[0])}"
    if kind is dict:
        return f"dict from {in_words(inner[0])} to {in_words(inner[1])}"
    if kind is os.PathLike:
        return "path"
    return {Any: "any", type(None): "`None`"}.get(hint) or hint.__name__


def shown(default: Any) -> str:
    """A default as it is written in Python, text in double quotes."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def command_line() -> str:
    """A section for each command of `keras-dist`, from its parser."""
    parser = command._parser()
    commands = next(
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    sections = []
    for name, sub in commands.choices.items():
        usage = sub.format_usage().removeprefix("usage: ").strip()
        sections += [f"## keras-dist {name}", sub.description or "", ""]
        sections += ["```text", usage, "```", "", *_command_rows(sub), ""]
    return "\n".join(sections)


def versions() -> str:
    """Make a table of what has passed in `make matrix`, the newest TensorFlow first."""
    rows = ["| TensorFlow | Python | Keras | all tests of two ranks | date |"]
    rows.append("|---|---|---|---|---|")
    for case in reversed(json.loads((Path(__file__).parents[1] / TRIED).read_text())):
        cells = [case[name] for name in ("tensorflow", "python", "keras")]
        cells += ["passed" if case["ranks"] else "–", case["date"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _command_rows(parser: argparse.ArgumentParser) -> list[str]:
    rows = ["| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
        names = [f"`{name}{value}`" for name in action.option_strings or [action.dest]]
        meaning = (action.help or "").replace("|", "\\|")
        rows.append(f"| {', '.join(names)} | {meaning} |")
    return rows


_PARTS = {
    part.__name__: part for part in (keras_arguments, options, command_line, versions)
}


def fill(text: str) -> str:
    """A page with its generated parts in it."""
    return _MARK.sub(lambda found: _PARTS[found[1]](), text)


def _fill_page(app: Any, name: str, source: list[str]) -> None:
    source[0] = fill(source[0])


# Names of several arguments that go on in a deeper line, up to their colon.
_NAMES = re.compile(r"^( +)([\w*, ]+,)\n((?:\1 +[\w*, ]+,\n)*)\1 +([\w*, ]+:)", re.M)
_FENCED = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^Example:\n\n((?:    .*\n|\n)+)", re.MULTILINE)
_DIALOG = re.compile(r"^Example:\n\n(?=>>>)", re.MULTILINE)


def restructured(docstring: str) -> str:
    """A docstring of this package as Sphinx reads it: code and long names marked."""

    def one_line(found: re.Match[str]) -> str:
        return found[1] + " ".join(" ".join(found.groups()[1:]).split())

    def block(found: re.Match[str]) -> str:
        code = textwrap.dedent(found.groups()[-1]).strip().replace("\n", "\n    ")
        return f".. rubric:: Example\n\n.. code-block:: python\n\n    {code}\n"

    text = _NAMES.sub(one_line, docstring)
    if "Example:\n\n```" in text:
        text = text.replace("Example:\n\n```", "```")
    text = _FENCED.sub(block, text)
    text = _CODE.sub(block, text)
    return _DIALOG.sub(".. rubric:: Example\n\n", text)


def _restructure(
    app: Any, what: str, name: str, item: Any, settings: Any, lines: list[str]
) -> None:
    lines[:] = restructured("\n".join(lines)).splitlines() + [""]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _fill_page)
    app.connect("autodoc-process-docstring", _restructure, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
