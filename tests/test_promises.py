"""Each promise has one page that states it, and no other page contradicts it."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import generated
import pytest
from harness.pages import DOCS, named, pages, supported_pythons

import keras_dist
from keras_dist.setup.arguments import Options
from keras_dist.version import (
    FIRST_TENSORFLOW,
    LAST_TENSORFLOW,
    OLDEST_KERAS,
    TENSORFLOW_RANGE,
    format_version,
)

# No sentence may be about this in these words.
_NOTHING = r"(?!)"


@dataclass(frozen=True)
class Promise:
    """What sentences about one thing have to say.

    Args:
        page: Where it is stated in full, from the root of the repository.
        states: A pattern of that statement.
        about: A pattern of sentences, rows and code on any page that are about it.
        says: A pattern that each of them has.
        wrong: Sentences that contradict it; nearly all once stood on a page.
    """

    page: str
    states: str
    about: str
    says: str
    wrong: tuple[str, ...]

    def is_broken_by(self, sentence: str) -> bool:
        """Return True if a sentence is about this, and says something else."""
        is_about = re.search(self.about, sentence)
        return bool(is_about) and not re.search(self.says, sentence)


PROMISES = {
    "time, not the model": Promise(
        page="docs/concepts/batch.md",
        states=r'With `batch="global"` the number of ranks changes the time',
        about=r"dist_fit.*(ranks|processes) changes the time",  # not `--distribute`
        says=r'batch="global"',
        wrong=(
            "`model.fit(…)` becomes `dist_fit(model, …)`, and **the number of "
            "processes changes the time, not the model**.",
        ),
    ),
    "whose batch": Promise(
        page="docs/concepts/batch.md",
        states=r'`batch="rank"` \(default\)',
        about=r"`batch_size` (is|becomes) the batch of (one|each) (rank|process)",
        says=r"[Dd]efault|Without it|batch=\"global\"",
        wrong=(
            "`batch_size` is the batch of one rank: N ranks make steps with the global "
            "batch, N × `batch_size` rows.",
        ),
    ),
    "what has to fit": Promise(
        page="docs/concepts/limits.md",
        states=r"has to fit on one device",
        about=r"\bfits? (on|in|into) (one|a|a single) (GPU|machine|host|device)\b",
        says=r"on one device",
        wrong=(
            "It is for those whose model fits on one GPU, or one machine, and takes "
            "too long.",
        ),
    ),
    "where the traceback stands": Promise(
        page="docs/how_to/launch.md",
        states=r"a report is printed at the end of the output: the traceback",
        about=r"traceback\b.*\b(first|last|end)\b|\b(first|last|end)\b.*\btraceback"
        r"|prints the error of the rank that failed first",
        says=r"\b(end|ends)\b.* traceback of the rank that failed first, then a line "
        r"for each rank",
        wrong=(
            "| one process fails | its traceback | in part | exit codes, no traceback "
            "| its traceback last, all processes ended |",
            "`keras-dist run` prints the error of the rank that failed first, then a "
            "line for each other rank.",
        ),
    ),
    "how many lines change": Promise(
        page="docs/how_to/migrate.md",
        states=r"^Two lines change: the import, and the call",
        about=r"lines? (of your script )?(changes?|differs?)\b"
        r"|what to change in a script",
        says=r"Two lines|2 lines",
        wrong=(
            "## One line of your script changes",
            "| what to change in a script | nothing | about 4 lines | 1 line |",
        ),
    ),
    "who saves": Promise(
        page="docs/how_to/saving.md",
        states=r"Save as on one process, on all ranks: the first rank writes",
        about=r"rank\(\) == 0:\s+model\.(save|export)",
        says=_NOTHING,
        wrong=('if keras_dist.rank() == 0:\n    model.save("digits.keras")',),
    ),
}

# History, which may say what is no longer so.
_HISTORY = ("docs/changelog.md", "docs/decisions.md")
_TEXTS = {named(page): page.read_text() for page in pages()}
_TEXTS["keras_dist/__init__.py"] = keras_dist.__doc__ or ""


def sentences(text: str) -> Iterator[str]:
    """Sentences, rows of tables and blocks of code, of which removed lines are none."""
    for number, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            kept = [line for line in part.splitlines() if not line.startswith("-")]
            yield "\n".join(line.removeprefix("+") for line in kept)
            continue
        for paragraph in re.split(r"\n(?=\n|\||- |#)", part):
            line = " ".join(paragraph.split())
            is_row = line.startswith("|")
            yield from [line] if is_row else re.split(r"(?<=[.?!]) (?=[A-Z`*\[])", line)


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_is_stated_on_its_page(name):
    """In the words that the table has."""
    promise = PROMISES[name]
    lines = " ".join(_TEXTS[promise.page].split())
    assert re.search(promise.states, _TEXTS[promise.page], re.MULTILINE) or (
        re.search(promise.states, lines)
    )


@pytest.mark.parametrize("name", PROMISES)
def test_no_page_contradicts_a_promise(name):
    """Whatever is said about it elsewhere is the same, or a link."""
    promise = PROMISES[name]
    found = [
        f"{page}: {sentence}"
        for page, text in _TEXTS.items()
        if page not in _HISTORY
        for sentence in sentences(text)
        if promise.is_broken_by(sentence)
    ]
    assert not found, f"{promise.page} says otherwise: {found}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [(name, wrong) for name, each in PROMISES.items() for wrong in each.wrong],
)
def test_a_contradiction_is_found(name, sentence):
    """In the middle of a page."""
    page = f"# Page\n\nSome text.\n{sentence}\n\nMore text.\n"
    if sentence.startswith("if "):
        page = f"# Page\n\n```python\n{sentence}\n```\n"
    assert any(map(PROMISES[name].is_broken_by, sentences(page)))


def test_the_table_of_the_readme_is_a_part_of_the_other_one():
    """Row by row, but for its last column."""
    rows = [row for row in _TEXTS["README.md"].splitlines() if row.count(" | ") == 4]
    assert 3 <= len(rows) <= 10  # head, line and at most eight rows
    others = _TEXTS["docs/concepts/peers.md"].splitlines()
    assert all(any(other.startswith(row) for other in others) for row in rows)


def test_each_variable_is_listed_once():
    """One meaning, too."""
    text = _TEXTS["docs/reference/environment.md"]
    cells = re.findall(r"^[|-] (`.*?)(?: \||: )", text, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert "CUDA_VISIBLE_DEVICES" in names
    twice = {name for name in names if names.count(name) > 1}
    assert not twice


def test_each_default_is_the_one_of_the_signature():
    """In each table of arguments of `dist_fit` and of a callback, on any page."""
    defaults: dict[str, set[str]] = {}
    for function in (Options, keras_dist.ReplicaCheck):
        for name, each in inspect.signature(function).parameters.items():
            defaults.setdefault(name, set()).add(generated.shown(each.default))
    head = r"^\| argument \| default \|.*\n((?:\|.*\n)+)"
    rows = [
        (page, *row)
        for page, text in _TEXTS.items()
        for table in re.findall(head, text, re.MULTILINE)
        for row in re.findall(r"^\| `(\w+)` \| `([^`]+)`", table, re.MULTILINE)
    ]
    assert {name for _, name, _ in rows} >= set(defaults)
    for page, name, shown in rows:
        assert shown in defaults.get(name, {shown}), f"{page}: {name}"


def test_the_ranges_of_versions_are_the_same_on_every_page():
    """But for what was tried: that is in versions.md."""
    pythons = supported_pythons()
    oldest = format_version(OLDEST_KERAS)
    for page, text in _TEXTS.items():
        if page in (*_HISTORY, "docs/reference/versions.md"):
            continue
        for found in re.findall(r"Python (?:\| )?(3\.\d+) to (3\.\d+)", text):
            assert found == (pythons[0], pythons[-1]), page
        for found in re.findall(r"Keras (?:\| )?(3\.\d+) (?:or newer|and later)", text):
            assert found == oldest, page
        for found in re.findall(r"TensorFlow (?:\| )?(2\.\d+ to 2\.\d+)", text):
            assert found == TENSORFLOW_RANGE, page


def test_each_claimed_version_was_tried():
    """By `make matrix`, whose table in versions.md has what passed."""
    tried = json.loads((DOCS / generated.TRIED).read_text())
    assert {_minor(case["python"]) for case in tried} == set(supported_pythons())
    assert {_minor(case["tensorflow"]) for case in tried} == {
        f"2.{minor}" for minor in range(FIRST_TENSORFLOW[1], LAST_TENSORFLOW[1] + 1)
    }
    assert format_version(OLDEST_KERAS) in {_minor(case["keras"]) for case in tried}
    newest = max(case["date"] for case in tried)
    assert f"the last run of `make matrix` was on {newest}" in _TEXTS["README.md"]


def _minor(text):
    """A version without its patch release."""
    return ".".join(text.split(".")[:2])
