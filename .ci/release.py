"""What `make release` needs beside the builds: its checks, its notes and its tag.

    python .ci/release.py check     before anything is built
    python .ci/release.py finish    notes, the site's archive, and the tag
    python .ci/release.py notes     print the notes

The version stands in `keras_dist/version.py` alone. Nothing is uploaded: the tag is
what `.github/workflows/release.yml` publishes.
"""

import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(changelog: str, version: str) -> str:
    """Return what the changelog says of a version; empty if it has no such section.

    Args:
        changelog: The text of `CHANGELOG.md`.
        version: A version, as in `## [1.0.0] - 2026-11-25`.
    """
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def problems(root: Path, version: str) -> list[str]:
    """Return why a folder cannot be released; empty if it can.

    Args:
        root: The repository.
        version: The version that it would have.
    """
    found = []
    if _git(root, "status", "--porcelain"):
        found.append("There are changes that are not committed: git status")
    if _git(root, "tag", "--list", f"v{version}"):
        found.append(
            f"Version {version} is tagged already. Raise it in keras_dist/version.py."
        )
    changelog = (root / "CHANGELOG.md").read_text()
    if not section(changelog, version):
        found.append(
            f'CHANGELOG.md has no section "## [{version}] - YYYY-MM-DD". Rename '
            '"[Unreleased]" to it, and begin a new one above.'
        )
    elif re.search(r"^## \[Unreleased\]\s+(?!## \[)\S", changelog, re.MULTILINE):
        found.append(
            f'CHANGELOG.md has entries under "[Unreleased]": move them to [{version}].'
        )
    return found


def notes(root: Path, version: str) -> str:
    """Return the section of a version, with a heading."""
    text = section((root / "CHANGELOG.md").read_text(), version)
    return f"# keras_dist {version}\n\n{text}\n"


def finish(root: Path, version: str) -> None:
    """Write the notes and the site's archive into `dist/`, and make the tag.

    Args:
        root: The repository, in which everything else was built.
        version: Its version.
    """
    dist = root / "dist"
    (dist / "RELEASE_NOTES.md").write_text(notes(root, version))
    site = f"keras_dist-{version}-site"
    with tarfile.open(dist / f"{site}.tar.gz", "w:gz") as archive:
        archive.add(root / "docs" / "_build" / "html", arcname=site)
    _git(root, "tag", "--annotate", "--message", f"keras_dist {version}", f"v{version}")
    print(f"\nReady in dist/, with the tag v{version}:")
    for path in sorted(dist.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(dist)}  {path.stat().st_size / 2**20:.1f} MiB")
    print(f"Nothing was uploaded. `git push origin v{version}` publishes the package.")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> None:
    """Check, finish, or print the notes."""
    version = runpy.run_path(str(ROOT / "keras_dist" / "version.py"))["__version__"]
    if sys.argv[1:] == ["check"]:
        if found := problems(ROOT, version):
            sys.exit("\n".join([f"Version {version} cannot be released:", *found]))
        print(f"Version {version} can be released.")
    elif sys.argv[1:] == ["finish"]:
        finish(ROOT, version)
    elif sys.argv[1:] == ["notes"]:
        print(notes(ROOT, version), end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
