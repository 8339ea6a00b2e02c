"""What pyproject.toml cannot say: the README of a distribution, with full links."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def with_full_links(text: str, home: str) -> str:
    """Replace links to files of the repository, which lead nowhere on an index.

    Args:
        text: A page in Markdown that lies in the root of the repository.
        home: Address of the repository.
    """

    def full(match: re.Match[str]) -> str:
        kind = "raw" if match[2].endswith((".png", ".svg")) else "blob"
        return f"{match[1]}{home}/{kind}/main/{match[2]}"

    return re.sub(r"""(\]\(|(?:src|srcset)=")(?!https://)([^)"]+)""", full, text)


def readme() -> str:
    """Return README.md with links to the home that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return with_full_links((ROOT / "README.md").read_text(), project["urls"]["Source"])


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
