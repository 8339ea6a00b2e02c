"""What README and documentation say is true: code, plan, diffs, commands, names."""

import ast
import difflib
import inspect
import json
import pkgutil
import re
import sys
from dataclasses import fields
from typing import Any

import generated
import keras
import pytest
from harness.launching import launch
from harness.pages import (
    DOCS,
    NOTEBOOK,
    ROOT,
    blocks,
    named,
    pages,
    project,
    pyproject,
    run_all,
    supported_pythons,
    with_snippets,
)

import keras_dist
from keras_dist import version
from keras_dist.setup.arguments import Options

README = (ROOT / "README.md").read_text()


def test_the_readme_runs_on_one_process(on_one_process):
    """As it stands."""
    assert on_one_process["README.md"]


@pytest.mark.long
def test_snippets_run_on_one_process(tmp_path):
    """Each page's in their order."""
    run_all(with_snippets(), tmp_path, None)


def test_snippets_run_on_two_ranks(on_two_ranks):
    """Each page's in their order."""
    assert set(with_snippets()) <= set(on_two_ranks)


def test_the_other_snippets_are_python():
    """What `make setup` alone cannot run: `make libraries` and tests/launch do."""
    for page in pages():
        for line, code in blocks(page, "py"):
            compile(code, f"{named(page)}:{line}", "exec")


def test_pages_include_the_first_snippet():
    """A reader who has pasted it once knows it; and each page has what it needs."""
    pages_with_it = [page for page in pages() if "first_snippet.py" in page.read_text()]
    assert len(pages_with_it) > 10
    for page in pages():
        text = "".join(
            code for kind in ("python", "py") for _, code in blocks(page, kind)
        )
        calls = re.search(r"\bmake_model\(", text)
        assert not calls or "def make_model(" in text, named(page)


def test_the_difference_of_the_examples_is_shown():
    """Every line in which the code of the two files differs."""
    single, many = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("fashion_mnist_single.py", "fashion_mnist.py")
    )
    lines = difflib.unified_diff(single, many, n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("@@", "---", "+++"))]
    start = changed.index("+import keras_dist")
    _, (_, shown) = blocks(DOCS / "how_to" / "migrate.md", "diff")
    assert sorted(shown.splitlines()) == sorted(changed[start:])


def test_the_plan_is_the_one_that_digits_prints(on_two_ranks):
    """All of it but the number of threads and the transport: the machine's."""
    started = (DOCS / "get_started.md").read_text()
    texts = "\n".join(on_two_ranks["examples/digits.py"]), README, started
    boxes = [re.findall(r"[╭│╰].*[╮│╯]", text) for text in texts]
    own = ("│ ranks", "│ transport")
    printed, *shown = ([s for s in box if not s.startswith(own)] for box in boxes)
    assert printed and shown == [printed, printed]


def test_dist_fit_takes_keras_arguments_and_options_alone():
    """The model, those of `fit` in its order, then those by name only; its defaults."""
    model, *others = _defaults(keras_dist.dist_fit)
    assert model == ("model", inspect.Parameter.empty)
    own = [(item.name, item.default) for item in fields(Options)]
    assert others == _defaults(keras.Model.fit)[1:] + own
    taken = inspect.signature(keras_dist.dist_fit).parameters.values()
    by_name = [p.name for p in taken if p.kind is p.KEYWORD_ONLY]
    assert by_name == [item.name for item in fields(Options)]


def _defaults(function: Any) -> list[tuple[str, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(item.name, item.default) for item in parameters]


def test_every_option_is_explained_with_its_default():
    """In a table of the page to which the reference links."""
    for item in fields(Options):
        page = (DOCS / "reference" / generated.PAGES[item.name]).resolve()
        row = f"| `{item.name}` | `{generated.shown(item.default)}` |"
        assert row in page.read_text(), f"{named(page)} has no row {row}"


def test_every_public_name_is_in_the_reference():
    """And nothing else is; each is there, and `__all__` is sorted."""
    text = (DOCS / "reference" / "api.md").read_text()
    listed = re.findall(
        r"^(?: {3}|\.\. auto\w+:: )keras_dist\.(\w+)$", text, re.MULTILINE
    )
    assert sorted(listed) == list(keras_dist.__all__)
    assert all(hasattr(keras_dist, name) for name in listed)


def _methods_on_pages() -> dict[str, str]:
    """Of classes in the reference, the methods that their pages show."""
    for node in ast.parse((DOCS / "conf.py").read_text()).body:
        if ast.unparse(node).startswith("autosummary_context ="):
            return ast.literal_eval(node.value)["shown_methods"]
    raise LookupError("docs/conf.py lists no methods")


def _in_reference() -> list[str]:
    """Each name with a page of its own, then each method that a page shows."""
    text = (DOCS / "reference" / "api.md").read_text()
    pages = re.findall(r"^ {3}(keras_dist\.[\w.]+)$", text, re.MULTILINE)
    shown = [
        f"{name}.{method}"
        for name, methods in _methods_on_pages().items()
        for method in methods.split(", ")
    ]
    # Its signature is compared with that of `dist_fit`, which describes it.
    shown.remove("keras_dist.DistributedModel.fit")
    return pages + shown


@pytest.mark.parametrize("name", _in_reference())
def test_the_reference_describes_each_public_name(name):
    """Every argument, what is returned, and an example; with types that say more."""
    found = pkgutil.resolve_name(name)
    text, signature = inspect.getdoc(found) or "", inspect.signature(found)
    taken = [item for item in signature.parameters.values() if item.name != "self"]
    described = generated.arguments_of(text) if "Args:\n" in text else {}
    assert sorted(described) == sorted(item.name for item in taken)
    is_class = inspect.isclass(found)
    if not is_class and signature.return_annotation is not None:
        # A colon in its first line would end a type, as Sphinx reads it.
        assert re.search(r"\nReturns:\n {4}[^:\n]+$", text, re.MULTILINE)
    if name.rpartition(".")[0] not in _methods_on_pages():
        assert "\nExample:\n\n" in text
    typed = ("model", "callbacks", "logs", "optimizer")
    assert Any not in [item.annotation for item in taken if item.name in typed]


def test_generated_parts_are_filled():
    """Every mark in a page is known, and the command line has all commands."""
    for page in (DOCS / "reference").glob("*.md"):
        assert "<!-- generated" not in generated.fill(page.read_text())
    for name in ("run", "check", "env", "install-horovod"):
        assert f"## keras-dist {name}\n" in generated.command_line()
    assert "| `--restarts K` |" in generated.command_line()


def test_the_extras_have_the_range_of_tensorflow():
    """And no dependency brings a second one beside the user's own."""
    extras, dependencies = project()["optional-dependencies"], project()["dependencies"]
    limits = version.TENSORFLOW.removeprefix("tensorflow")
    assert extras["tensorflow"] == [version.TENSORFLOW]
    assert extras["tensorflow-cpu"] == [f"tensorflow-cpu{limits}"]
    assert version.TENSORFLOW in pyproject()["dependency-groups"]["dev"]
    assert extras["gpu"][0] == f"tensorflow[and-cuda]{limits}"
    assert not any("tensorflow" in each for each in dependencies)
    assert version.KERAS in dependencies


def test_the_readme_of_a_distribution_has_full_links():
    """To files that there are; on PyPI others lead nowhere."""
    home, readme = project()["urls"]["Source"], README
    hook = pyproject()["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        readme = re.sub(each["pattern"], each["replacement"], readme)
    links = re.findall(r"""(?:\]\(|src="|srcset=")([^)"]+)""", readme)
    files = [link.removeprefix(home) for link in links if link.startswith(home)]
    assert all(link.startswith("https://") for link in links) and len(files) > 20
    assert "/raw/main/docs/curve-light.svg" in files
    files = [file for file in files if not file.startswith("/actions/")]
    for file in files:
        assert (ROOT / re.sub("^/(blob|raw)/main/", "", file)).is_file(), file


def test_the_commands_exist():
    """`make` targets, the console command, its subcommands and their options."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "check", "test", "demo", "docs"):
        assert f"\n{target}:" in makefile
    for argument in ("--help", "--version"):
        launch([sys.executable, "-m", "keras_dist", argument], check=True)
    for page in pages():
        for name, rest in re.findall(
            r"keras-dist (run|check|env|install-horovod)\b([^`\n]*)",
            page.read_text(),
        ):
            # Up to the script, whose options are its own, and without ssh's.
            ours = re.sub(r'"[^"]*"?', "", re.split(r"\.py|#", rest)[0])
            for option in re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)", ours):
                assert re.search(rf"`{option}[` ]", _section(name)) or option == "-m"
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in ci and "make docs\n" in ci


def _section(command: str) -> str:
    sections = generated.command_line().split("## keras-dist ")
    return next(text for text in sections if text.startswith(f"{command}\n"))


def test_settings_of_the_documentation_are_pinned_by_ranges():
    """So that warnings of a new version are no errors of ours."""
    wanted = pyproject()["dependency-groups"]["docs"]
    assert wanted and all(">=" in one and "<" in one for one in wanted)


def test_each_supported_python_is_tried_by_the_workflow():
    """Those of the metadata."""
    supported = supported_pythons()
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (tried,) = re.findall(r"python: (\[.*\])", workflow)
    assert supported and json.loads(tried) == supported


def test_the_files_that_the_architecture_names_are_there():
    """Of the package, and of its tests."""
    text = (DOCS / "concepts" / "architecture.md").read_text()
    files = re.findall(r"[\w/]+\.py", text)
    assert len(files) > 10
    for file in files:
        assert (ROOT / "keras_dist" / file).exists() or (ROOT / file).exists(), file


def test_nothing_is_long():
    """All pages with the README, in the words that `wc` counts; and each example."""
    every = [*pages(), NOTEBOOK]
    assert sum(len(page.read_text().split()) for page in every) <= 26_000
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 700
    assert len((DOCS / "concepts" / "limits.md").read_text().split()) <= 700
    assert len(README.splitlines()) <= 100
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path
