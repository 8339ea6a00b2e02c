"""The pages of the documentation, and a script that runs the code in them.

    python tests/harness/pages.py FOLDER PAGE_OR_SCRIPT …

All in one process, each in a namespace and a folder of its own, since to import
TensorFlow takes seconds. A script may have arguments: "examples/files.py files".
"""

import os
import re
import sys
import tomllib
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "notebook.md"  # executed when the site is built

# Pages whose snippets are one script, which runs as it stands.
ALONE = DOCS / "how_to" / "libraries"


def has_fashion_mnist() -> bool:
    """Return True if these pictures are on this machine: Debian's, or Keras's own."""
    folders = Path("/usr/share"), Path.home() / ".keras"
    name = "datasets/fashion-mnist/train-images-idx3-ubyte.gz"
    return any((folder / name).exists() for folder in folders)


def pages() -> list[Path]:
    """README.md and all pages of the site."""
    found = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
    return [ROOT / "README.md", *(page for page in found if page != NOTEBOOK)]


def pyproject() -> dict[str, Any]:
    """All of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def project() -> dict[str, Any]:
    """The metadata of the package."""
    return pyproject()["project"]


def supported_pythons() -> list[str]:
    """Those of the metadata."""
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The code blocks of a page in one language: first line's number, and text.

    A file that the page includes comes before them.
    """
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shown = [(text[: block.start(1)].count("\n") + 1, block[1]) for block in found]
    files = re.findall(r"^```\{literalinclude\} (\S+\.py)$", text, re.MULTILINE)
    included = [(1, (page.parent / file).read_text()) for file in files]
    return included + shown if shown else []


def named(page: Path) -> str:
    """Its path from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def with_snippets() -> list[str]:
    """The pages with code that `make setup` alone can run."""
    return [named(page) for page in pages() if blocks(page, "python")]


def _run(path: Path, words: list[str], folder: Path) -> None:
    """Run a script, or all Python snippets of a page in their order, and no others."""
    name = re.sub(r"\W", "_", str(path))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # where classes and functions of the page are looked up
    here = folder / name
    here.mkdir(parents=True, exist_ok=True)  # one for all ranks
    os.chdir(here)
    if path.suffix == ".py":
        sys.argv = [str(path), *words]
        sys.path.insert(0, str(path.parent))
        parts = [(1, path.read_text())]
    else:  # "py" are those that `make setup` alone cannot run
        parts = blocks(path, "python") or blocks(path, "py")
    for line, code in parts:
        # Numbered as in the page, which a traceback then shows.
        padded = "\n" * (line - 1) + code
        exec(compile(padded, str(path), "exec"), vars(module))


def write_digits(folder: Path) -> str:
    """`examples/digits_keras.py` with a call of `dist_fit`, for two epochs; its path.

    It and `plain.py` beside it, which has none, save the weights in the folder.
    """
    source = (ROOT / "examples" / "digits_keras.py").read_text()
    assert "keras_dist." not in source and "import keras_dist" not in source
    ours = source.replace("import keras\n", "import keras\n\nimport keras_dist\n", 1)
    ours = ours.replace("model.fit(x, y,", "keras_dist.dist_fit(model, x, y,")
    ours = ours.replace("epochs=30", 'epochs=30, batch="global"')
    for name, code in (("plain", source), ("ours", ours)):
        assert "epochs=30" in code
        save = f"\nmodel.save_weights({str(folder / name)!r} + '.weights.h5')\n"
        code = code.replace("epochs=30", "epochs=2") + save
        (folder / f"{name}.py").write_text(code)
    return str(folder / "ours.py")


def run_all(names: list[str], folder: Path, ranks: int | None) -> dict[str, list[str]]:
    """Run pages and scripts in one launch; return what each prints, line by line."""
    from harness.launching import launch  # noqa: PLC0415 - no rank needs it

    command = ["tests/harness/pages.py", folder, *names]
    done = launch(command, ranks=ranks, timeout=600, check=True)
    parts = re.split(r"^== (.*)\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], map(str.splitlines, parts[1::2]), strict=True))


def main(folder: str, *names: str) -> int:
    """Run pages and scripts; stop at the first that raises."""
    import keras  # noqa: PLC0415 - only the ranks need it

    for each in names:
        name, *words = each.split()
        keras.config.set_dtype_policy("float32")  # a page may have chosen another one
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(f"== {name}", flush=True)
        try:
            _run(ROOT / name, words, Path(folder))
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                continue
            print(f"In {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
