"""`keras-dist install-horovod --wheel-dir`: built once, taken wherever it fits."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

from keras_dist.tools.install import InstallError, facts, recipe, wheels

FACTS = facts.Facts(tensorflow="2.21.0", python=sys.version_info[:2], glibc=(2, 36))
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
CHOICES = [facts.Choice(*pair) for pair in itertools.product((False, True), repeat=2)]
LIBRARY = f"horovod/tensorflow/mpi_lib.{sysconfig.get_config_var('SOABI')}.so"


def stand_in(folder, *, needs=()):
    """A wheel as pip has built it, with a library that names what it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-0.28.1-{TAG}-{TAG}-linux_x86_64.whl"
    texts = ["libc.so.6", *needs, "GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4.30"]
    info = "horovod-0.28.1.dist-info"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("horovod/__init__.py", "")
        files.writestr(LIBRARY, b"\x7fELF\0" + "\0".join(texts).encode() + b"\0")
        files.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        )
        files.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
            f"Tag: {TAG}-{TAG}-linux_x86_64\n",
        )
        files.writestr(f"{info}/RECORD", "")
    return path


def kept(folder, choice=CHOICES[0], needs=(), **changed):
    """A stand-in that was kept in a folder."""
    built = stand_in(folder / "built", needs=needs)
    return wheels.keep(built, dataclasses.replace(FACTS, **changed), choice, folder)


def find(folder, *, mpi=None, nccl=None, **changed):
    """What is taken from a folder, and the sentences about the others."""
    return wheels.find(
        folder, dataclasses.replace(FACTS, **changed), mpi=mpi, nccl=nccl
    )


@pytest.fixture
def all_libraries(monkeypatch):
    """A host with Open MPI and NCCL."""
    monkeypatch.setattr(wheels, "is_loadable", lambda library: True)


def test_a_name_says_for_what_a_wheel_was_built(tmp_path):
    """TensorFlow, transports, C library, patches; and it can be read back."""
    for choice in CHOICES:
        path = kept(tmp_path, choice)
        wheel = wheels.wheel_of(path.name)
        assert wheel.name == path.name
        assert (wheel.mpi, wheel.nccl) == (choice.mpi, choice.nccl)
        assert (wheel.tensorflow, wheel.glibc) == ("2.21.0", "2.34")
        assert wheel.patches == wheels.fingerprint()
    # Whole files alone: another host may look at any time.
    names = [path.name for path in tmp_path.iterdir()]
    assert not any(name.startswith(".") for name in names) and len(names) == 5


def test_pip_takes_the_name(tmp_path):
    """It stands where the format of wheels has the build number."""
    path = kept(tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "-q"]
    subprocess.run([*pip, "--target", tmp_path / "site", path], check=True)
    assert (tmp_path / "site" / LIBRARY).is_file()


def test_each_request_finds_the_wheels_that_have_it(tmp_path, all_libraries):
    """Yes, no and left open, for MPI and NCCL: of several, that with most."""
    for choice in CHOICES:
        kept(tmp_path, choice)
    for mpi, nccl in itertools.product((None, False, True), repeat=2):
        path, refused = find(tmp_path, mpi=mpi, nccl=nccl)
        wheel = wheels.wheel_of(path.name)
        assert wheel.mpi == (mpi is None or mpi)
        assert wheel.nccl == (nccl is None or nccl)
        fitting = (1 if mpi is not None else 2) * (1 if nccl is not None else 2)
        assert len(refused) == 4 - fitting
    _, refused = find(tmp_path, mpi=True, nccl=False)
    assert "It has no MPI, and --mpi was given." in refused.values()
    assert "It has NCCL, and --no-nccl was given." in refused.values()


MISFITS = [
    ({"tensorflow": "2.20.0"}, "built for TensorFlow 2.21.0, and here is 2.20.0."),
    ({"tensorflow": None}, "and here is none."),
    (
        {"python": (3, 9)},
        f"built for {TAG} {TAG} linux_x86_64, and this Python is cp39",
    ),
    ({"platform": "linux_aarch64"}, f"this Python is {TAG} linux_aarch64."),
    ({"glibc": (2, 31)}, "It needs glibc 2.34, and here is 2.31"),
    ({"glibc": (2, 4)}, "It needs glibc 2.34, and here is 2.4"),
    ({"glibc": (0, 0)}, "It needs glibc 2.34, and here is 0.0"),
]


@pytest.mark.parametrize(("host", "sentence"), MISFITS)
def test_a_wheel_for_another_environment_is_refused_with_a_sentence(
    tmp_path, host, sentence
):
    """It would crash, or could not be loaded."""
    path = kept(tmp_path)
    assert find(tmp_path) == (path, {})
    found, refused = find(tmp_path, **host)
    assert found is None
    assert sentence in refused[path.name]


def test_a_wheel_of_other_patches_or_without_a_name_of_ours_is_refused(
    tmp_path, monkeypatch
):
    """Nothing says what a wheel of pip's name was built for."""
    path = kept(tmp_path)
    stand_in(tmp_path)
    monkeypatch.setattr(wheels, "fingerprint", lambda: "01234567")
    found, refused = find(tmp_path)
    assert found is None
    assert "other patches" in refused.pop(path.name)
    (sentence,) = refused.values()
    assert "Its name does not say" in sentence


def test_a_wheel_whose_libraries_are_missing_is_refused(tmp_path):
    """Of MPI and NCCL; the one over Gloo alone is taken."""
    plain = kept(tmp_path)
    needs = ["libmpi_none.so.40", "libnccl_none.so.2"]
    mpi = kept(tmp_path, facts.Choice(mpi=True), needs=needs[:1])
    both = kept(tmp_path, facts.Choice(True, True), needs=needs)
    assert wheels.needed_libraries(both) == needs
    found, refused = find(tmp_path)
    assert found == plain
    assert "It needs libmpi_none.so.40, which is not found here" in refused[mpi.name]
    assert "openmpi-bin" in refused[mpi.name]
    _, refused = find(tmp_path, distribution="tensorflow-cpu")
    assert "here is `tensorflow-cpu`" in refused[both.name]
    assert wheels.is_loadable("libc.so.6")


BUILT = wheels.Built(
    "0.28.1", "2.21.0", "2.21.0", gloo=True, mpi=False, nccl=False, is_patched=True
)


@pytest.fixture
def host(monkeypatch):
    """A host without compiler and make; the commands that are run there."""
    bare = dataclasses.replace(FACTS, has_compiler=False, has_make=False)
    commands = []
    monkeypatch.setattr(recipe, "detect", lambda: bare)
    monkeypatch.setattr(recipe, "probe", lambda: (BUILT, ""))
    monkeypatch.setattr(
        recipe.Steps, "run", lambda self, what, command, **_: commands.append(command)
    )
    monkeypatch.setattr(
        recipe.Steps, "try_to_run", lambda self, what, command: commands.append(command)
    )
    return commands


def test_a_wheel_that_fits_is_taken_without_a_compiler(tmp_path, host, capsys):
    """What it imports comes from the folder, too, and from the index only if not."""
    path = kept(tmp_path)
    recipe.install_horovod(wheel_dir=tmp_path)
    offline, online, install = ([*map(str, command)] for command in host)
    assert "--no-index" in offline and str(tmp_path) in offline
    assert "--no-index" not in online and "cloudpickle" in online
    assert install[-1] == str(path) and "--no-deps" in install
    printed = capsys.readouterr().out
    assert f"is taken, and not built: {path}" in printed
    assert "With MPI, ranks of one machine" in printed
    assert "openmpi-bin && keras-dist install-horovod --mpi" in printed
    recipe.install_horovod(wheel_dir=tmp_path, mpi=False)
    assert "With MPI" not in capsys.readouterr().out


def test_without_a_wheel_that_fits_the_message_says_why_and_what_a_build_needs(
    tmp_path, host, capsys
):
    """Both ways are shown: another wheel, or a compiler."""
    path = kept(tmp_path, tensorflow="2.20.0")
    with pytest.raises(InstallError) as error:
        recipe.install_horovod(wheel_dir=tmp_path)
    assert f"No wheel of Horovod, of 1, in {tmp_path} fits" in str(error.value)
    assert "a C++ compiler" in str(error.value)
    assert f"Not taken: {path.name}\n    It was built for" in capsys.readouterr().out
    with pytest.raises(InstallError, match="No wheel of Horovod in .* fits"):
        recipe.install_horovod(wheel_dir=tmp_path / "none")
    assert host == []


def test_what_is_built_is_kept_with_what_it_imports(tmp_path, host, monkeypatch):
    """For hosts without a network; the folder is made."""
    monkeypatch.setattr(recipe, "detect", lambda: FACTS)
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: stand_in(tmp_path / "built"))
    folder = tmp_path / "a" / "wheels"
    recipe.install_horovod(wheel_dir=folder)
    assert wheels.wheel_of(next(folder.iterdir()).name).transports == "gloo"
    download = next(command for command in host if "download" in command)
    assert "packaging" in {word.partition("==")[0] for word in download}
    host.clear()
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: pytest.fail("built again"))
    recipe.install_horovod(wheel_dir=folder)
    assert len(host) == 3


def test_a_wheel_that_cannot_be_imported_is_no_success(tmp_path, host, monkeypatch):
    """The message says which it was."""
    path = kept(tmp_path)
    monkeypatch.setattr(recipe, "probe", lambda: (None, "undefined symbol: x"))
    with pytest.raises(InstallError, match="cannot be imported") as error:
        recipe.install_horovod(wheel_dir=tmp_path)
    assert f"was taken from {path} and installed" in str(error.value)


@contextlib.contextmanager
def measured(limit):
    """The block takes at most so many seconds."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < limit


def environment_in(folder):
    """A new environment, with TensorFlow but without Horovod; its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", script], capture_output=True, text=True)
    (Path(own.stdout.strip()) / "first.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.long
def test_a_second_environment_needs_no_compiler_no_network_and_no_minute(tmp_path):
    """The first one builds Horovod, for minutes; both import it."""
    source = str(Path(__file__).parents[2])
    command = ["-m", "keras_dist", "install-horovod", "--no-mpi", "--no-nccl"]
    command += ["--wheel-dir", tmp_path / "wheels"]
    env = os.environ | {"PYTHONPATH": source}
    first = environment_in(tmp_path / "first")
    subprocess.run([first, *command], env=env, check=True)
    second = environment_in(tmp_path / "second")
    (tmp_path / "bin").mkdir()
    env |= {"PATH": str(tmp_path / "bin"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    assert shutil.which("c++", path=env["PATH"]) is None
    with measured(60):
        done = subprocess.run(
            [second, *command], env=env, check=True, capture_output=True, text=True
        )
    assert "is taken, and not built" in done.stdout
    assert "Gloo yes, MPI no, NCCL no" in done.stdout
    assert "It has keras_dist's patch" in done.stdout
    script = "import horovod; print(horovod.__file__)"
    where = subprocess.run([second, "-P", "-c", script], capture_output=True, text=True)
    assert where.stdout.startswith(str(tmp_path / "second"))
