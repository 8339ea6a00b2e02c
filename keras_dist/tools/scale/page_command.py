"""The command `keras-dist page`: make a page from a JSON, on any machine."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_dist.report import check_installed, training_page, write_whole
from keras_dist.report.training import FORMAT
from keras_dist.tools.scale.scale_page import scale_page

_PAGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "training": training_page,
    "scale": scale_page,
}


def add_page(commands: argparse._SubParsersAction) -> None:
    """Add the command `page` to those of `keras-dist`."""
    command = commands.add_parser(
        "page",
        help="make a page from the JSON of a report or a study",
        description=(
            "Make the page of a training (`report=`) or of a study (`keras-dist "
            "scale`) from its JSON, which may come from a machine that cannot."
        ),
    )
    command.add_argument("file", type=Path, nargs="+", help="JSON files")
    command.set_defaults(run=_page)


def _page(options: argparse.Namespace) -> int:
    check_installed()
    for path in options.file:
        content = json.loads(path.read_text(encoding="utf-8"))
        output = path.with_suffix(".html")
        write_whole(output, page_of(content))
        print(output)
    return 0


def page_of(content: Any) -> str:
    """The page of a JSON, as HTML.

    Raises:
        ValueError: If it is not one of a training or a study, or of another version.
    """
    is_ours = isinstance(content, dict) and content.get("kind") in _PAGES
    if not is_ours or content.get("format") != FORMAT:
        raise ValueError(
            "A page is made from the JSON of a training or of a study, as this version "
            f"of keras_dist writes it. Received: {str(content)[:80]}"
        )
    return _PAGES[content["kind"]](content)
