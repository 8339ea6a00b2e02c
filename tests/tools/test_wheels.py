"""`install-horovod --wheel-dir` and `--find-links`: built once, taken where it fits."""

import dataclasses
import hashlib
import shutil
import sys
import sysconfig
import zipfile

import pytest

from keras_dist.tools.install import build, facts, recipe
from keras_dist.tools.install.steps import PIP

BUILT = recipe.Built(
    "0.28.1", "2.21.0", "2.21.0", mpi=False, nccl=False, is_patched=True
)
FACTS = facts.Facts(tensorflow="2.21.0")
BARE = dataclasses.replace(FACTS, has_compiler=False, has_make=False)
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def make_wheel(
    folder, *, tensorflow="2.21.0", choice=None, python=TAG, platform=PLATFORM
):
    """A stand-in for a wheel that was built here."""
    local = build.local_version(tensorflow, choice or facts.Choice())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-0.28.1+{local}-{python}-{python}-{platform}.whl"
    info = f"horovod-0.28.1+{local}.dist-info"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("horovod/__init__.py", "")
        files.writestr("horovod/made_for.txt", path.name)
        metadata = f"Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1+{local}\n"
        files.writestr(f"{info}/METADATA", metadata)
        tags = f"Root-Is-Purelib: false\nTag: {python}-{python}-{platform}\n"
        files.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        files.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Where pip installs; the only packages are in the test's folders."""
    install = (*PIP, "install", "--no-deps", "--target", str(tmp_path / "site"))
    monkeypatch.setattr(recipe, "_INSTALL", install)
    monkeypatch.setattr(recipe, "_REPLACE", (*install, "--upgrade"))
    monkeypatch.setattr(recipe, "RUNTIME", ("horovod", "none; python_version < '3'"))
    monkeypatch.setattr(recipe, "detect", lambda: BARE)
    monkeypatch.setattr(recipe, "probe", lambda: (BUILT, ""))
    return tmp_path / "site"


def taken(site):
    """The name of the wheel that pip has installed."""
    return (site / "horovod" / "made_for.txt").read_text()


def test_the_wheel_that_fits_is_taken_without_a_compiler(tmp_path, site, capsys):
    """By pip, among those for other versions of TensorFlow and Python, and machines."""
    folder = tmp_path / "wheels"
    fitting = make_wheel(folder, platform="manylinux_2_17_x86_64")
    make_wheel(folder, tensorflow="2.20.0")
    make_wheel(folder, python="cp39")
    make_wheel(folder, platform="manylinux_2_17_aarch64")
    recipe.install_horovod(find_links=folder)
    assert taken(site) == fitting.name
    assert "Horovod 0.28.1 is built for" in capsys.readouterr().out


def test_of_several_wheels_the_one_with_what_works_here_is_taken(
    tmp_path, site, monkeypatch
):
    """With MPI where Open MPI is, unless it is not wanted."""
    folder = tmp_path / "wheels"
    plain, mpi = (make_wheel(folder, choice=facts.Choice(mpi=m)) for m in (0, 1))
    recipe.install_horovod(wheel_dir=folder)
    assert taken(site) == plain.name
    has_mpi = dataclasses.replace(BARE, has_open_mpi=True)
    monkeypatch.setattr(recipe, "detect", lambda: has_mpi)
    recipe.install_horovod(wheel_dir=folder)
    assert taken(site) == mpi.name
    recipe.install_horovod(wheel_dir=folder, mpi=False)
    assert taken(site) == plain.name


@pytest.mark.parametrize("is_intact", [True, False])
def test_a_published_wheel_is_taken_by_default_if_its_hash_is_right(
    tmp_path, site, monkeypatch, is_intact
):
    """Otherwise Horovod is built, as where no wheel fits."""
    wheel = make_wheel(tmp_path / "wheels")
    digest = hashlib.sha256(wheel.read_bytes() + b"x" * (not is_intact))
    lines = f"{wheel.as_uri()}#sha256={digest.hexdigest()}\n"
    (tmp_path / "wheels.txt").write_text(f"{lines.replace('-cp3', '-cp2')}{lines}")
    monkeypatch.setattr(recipe, "_PUBLISHED", tmp_path / "wheels.txt")
    if is_intact:
        recipe.install_horovod()
        assert taken(site) == wheel.name
        assert recipe.find_published("horovod==0.28.1+of.another.choice") == []
    else:
        with pytest.raises(RuntimeError, match="cannot be installed here"):
            recipe.install_horovod()
        assert not site.exists()


@pytest.mark.parametrize("what", ["TensorFlow", "patches", "folder"])
def test_without_a_wheel_that_fits_horovod_is_built(
    tmp_path, site, monkeypatch, capsys, what
):
    """Of another TensorFlow or keras_dist, or none; it says what a build needs."""
    folder = tmp_path / "wheels"
    if what != "folder":
        make_wheel(folder, tensorflow="2.20.0" if what == "TensorFlow" else "2.21.0")
    if what == "patches":
        monkeypatch.setattr(build, "CXX_FLAG", "-O3")
    with pytest.raises(RuntimeError, match="cannot be installed here") as error:
        recipe.install_horovod(find_links=folder)
    assert "a C++ compiler" in str(error.value)
    printed = capsys.readouterr().out
    assert f"No wheel of Horovod in {folder} fits: it is built." in printed
    assert not site.exists()


def test_what_is_built_is_kept_with_what_it_imports(tmp_path, site, monkeypatch):
    """And taken the next time, without a build; the folder is made."""
    monkeypatch.setattr(recipe, "detect", lambda: FACTS)
    wheel = make_wheel(tmp_path / "built")
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: wheel)
    monkeypatch.setattr(recipe, "RUNTIME", (str(wheel), "none; python_version < '3'"))
    folder = tmp_path / "a" / "wheels"
    recipe.install_horovod(wheel_dir=folder)
    assert [path.name for path in folder.iterdir()] == [wheel.name]
    shutil.rmtree(site)
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: pytest.fail("built again"))
    recipe.install_horovod(wheel_dir=folder)
    assert taken(site) == wheel.name


def test_a_wheel_that_cannot_be_imported_is_no_success(tmp_path, site, monkeypatch):
    """The message says which it was."""
    make_wheel(tmp_path / "wheels")
    monkeypatch.setattr(recipe, "probe", lambda: (None, "undefined symbol: x"))
    with pytest.raises(RuntimeError, match="cannot be imported") as error:
        recipe.install_horovod(wheel_dir=tmp_path / "wheels")
    assert "was taken as horovod==0.28.1+keras.dist.tf2.21.gloo" in str(error.value)


def test_nothing_is_installed_if_nothing_is_needed(monkeypatch, capsys):
    """As in each later `make setup`."""
    monkeypatch.setattr(recipe, "probe", lambda: (BUILT, ""))
    monkeypatch.setattr(recipe, "detect", lambda: pytest.fail("looked"))
    recipe.install_horovod(only_if_needed=True)
    assert "Horovod 0.28.1 is built for" in capsys.readouterr().out
