"""Where a line may be broken: at the parts of a long name, and never in a number."""

import re
from typing import Any

# Sphinx puts each word of inline code into one of these.
_WORD = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
_PART = re.compile(r"(?<=\w)([._/=(])(?=[A-Za-z])")
_NUMBER = re.compile(r"<td>(?=<p>[\d.,]+(?:e[+-]\d+)?\*?</p>)")


def wrapped(body: str) -> str:
    """Mark where lines of a page may be broken.

    Args:
        body: The HTML of a page.
    """
    body = _WORD.sub(lambda word: _PART.sub(r"\1<wbr>", word[0]), body)
    return _NUMBER.sub('<td class="number">', body)


def _wrap(app: Any, page: str, template: str, context: dict[str, Any], _: Any) -> None:
    if "body" in context:
        context["body"] = wrapped(context["body"])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", _wrap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
