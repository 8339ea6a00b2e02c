"""`make release` in a repository of its own; what `make matrix` would try."""

import runpy
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-11-25

### Added

- A.

## [1.2.2] - 2026-10-01

- B.
"""


@pytest.fixture(scope="module")
def release():
    """Its functions."""
    return runpy.run_path(str(ROOT / ".ci" / "release.py"))


@pytest.fixture
def repository(tmp_path):
    """One that can be released."""
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("dist\ndocs\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def commit(folder):
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")


def test_the_notes_are_the_section_of_the_version(release, repository, monkeypatch):
    """And the tag has its name; nothing else is in the repository afterwards."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.com")
    assert release["problems"](repository, "1.2.3") == []
    (repository / "dist").mkdir()
    (repository / "docs" / "_build" / "html").mkdir(parents=True)
    (repository / "docs" / "_build" / "html" / "index.html").write_text("site")
    release["finish"](repository, "1.2.3")
    notes = (repository / "dist" / "RELEASE_NOTES.md").read_text()
    assert notes == "# keras_dist 1.2.3\n\n### Added\n\n- A.\n"
    with tarfile.open(repository / "dist" / "keras_dist-1.2.3-site.tar.gz") as site:
        assert "keras_dist-1.2.3-site/index.html" in site.getnames()
    (problem,) = release["problems"](repository, "1.2.3")
    assert "is tagged already" in problem


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("[1.2.3]", "[1.2.4]", 'no section "## [1.2.3] - YYYY-MM-DD"'),
        ("### Added\n\n- A.\n", "", 'no section "## [1.2.3] - YYYY-MM-DD"'),
        ("[Unreleased]", "[Unreleased]\n\n- C.", 'entries under "[Unreleased]"'),
        ("[Unreleased]", "[Unreleased]\n\n### Added\n\n- C.", 'under "[Unreleased]"'),
    ],
)
def test_a_changelog_that_does_not_fit_is_refused(release, repository, old, new, text):
    """Before anything is built."""
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new, 1))
    commit(repository)
    (problem,) = release["problems"](repository, "1.2.3")
    assert text in problem


def test_changes_that_are_not_committed_are_refused(release, repository):
    """They would be in what is built, and not in the tag."""
    (repository / "new.py").write_text("")
    (problem,) = release["problems"](repository, "1.2.3")
    assert "not committed" in problem


def test_the_matrix_has_all_pairs_and_the_oldest_keras_at_its_corners(monkeypatch):
    """The corners are tried with the tests of ranks, too."""
    monkeypatch.chdir(ROOT)
    listed = runpy.run_path(".ci/matrix.py")["list_cases"]()
    cases = {case.name: case.keras[0] for case in listed}
    assert len([name for name in cases if name.endswith("newest")]) == 10
    assert cases["py311_tf218_oldest"] == cases["py312_tf218_oldest"] == "keras==3.10.*"
    assert cases["py311_tf221_oldest"] == cases["py313_tf221_oldest"] == "keras==3.12.*"
