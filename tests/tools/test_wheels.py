"""`install-horovod --wheel-dir` and `--find-links`: built once, taken where it fits."""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from pathlib import Path

import pytest

from keras_dist.tools.install import InstallError, facts, recipe, wheels

FACTS = facts.Facts(tensorflow="2.21.0", python=sys.version_info[:2], glibc=(2, 36))
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
CHOICES = [facts.Choice(*pair) for pair in itertools.product((False, True), repeat=2)]
VERSION = "0.28.1+keras.dist.tf2.21"
LIBRARY = f"horovod/tensorflow/mpi_lib.{sysconfig.get_config_var('SOABI')}.so"


def stand_in(folder, *, needs=(), platform="linux_x86_64"):
    """A wheel as pip has built it, with a library that names what it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-{VERSION}-{TAG}-{TAG}-{platform}.whl"
    texts = ["libc.so.6", *needs, "GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4.30"]
    info = f"horovod-{VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("horovod/__init__.py", "")
        files.writestr(LIBRARY, b"\x7fELF\0" + "\0".join(texts).encode() + b"\0")
        files.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: horovod\nVersion: {VERSION}\n",
        )
        files.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
            f"Tag: {TAG}-{TAG}-{platform}\n",
        )
        files.writestr(f"{info}/RECORD", "")
    return path


def kept(folder, choice=CHOICES[0], needs=(), platform="linux_x86_64", **changed):
    """A stand-in that was kept in a folder."""
    built = stand_in(folder / "built", needs=needs, platform=platform)
    return wheels.keep(built, dataclasses.replace(FACTS, **changed), choice, folder)


def find(folder, *, mpi=None, nccl=None, **changed):
    """What is taken from a folder, and the sentences about the others."""
    names = [path.name for path in folder.glob("horovod-*.whl")]
    found = dataclasses.replace(FACTS, **changed)
    return wheels.find(names, folder.joinpath, found, mpi=mpi, nccl=nccl)


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
        assert (wheel.tensorflow, wheel.glibc) == ("2.21", "2.34")
        assert wheel.patches == wheels.fingerprint()
    # Whole files alone: another host may look at any time.
    names = [path.name for path in tmp_path.iterdir()]
    assert not any(name.startswith(".") for name in names) and len(names) == 5


def test_pip_takes_the_name(tmp_path):
    """What it says stands where the format of wheels has versions and build numbers."""
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
    ({"tensorflow": "2.20.0"}, "built for TensorFlow 2.21, and here is 2.20.0."),
    ({"tensorflow": "2.2.1"}, "built for TensorFlow 2.21, and here is 2.2.1."),
    ({"tensorflow": None}, "and here is none."),
    (
        {"python": (3, 9)},
        f"built for {TAG} {TAG} linux_x86_64, and this Python is cp39",
    ),
    ({"platform": "linux_aarch64"}, f"this Python is {TAG} linux_aarch64 with glibc"),
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


def test_a_wheel_serves_all_patch_releases_of_its_tensorflow(tmp_path):
    """They have one C++ library; of a release candidate, too."""
    path = kept(tmp_path, tensorflow="2.21.0")
    for version in ("2.21.0", "2.21.3", "2.21.0rc1"):
        assert find(tmp_path, tensorflow=version) == (path, {})


@pytest.mark.parametrize(
    ("platform", "fits"),
    [
        ("manylinux_2_34_x86_64", True),
        ("manylinux_2_36_x86_64", True),
        ("manylinux_2_17_x86_64.manylinux2014_x86_64", True),
        ("manylinux_2_37_x86_64", False),
        ("manylinux_2_34_aarch64", False),
        ("musllinux_1_2_x86_64", False),
    ],
)
def test_the_platforms_of_auditwheel_are_understood(tmp_path, platform, fits):
    """By glibc, here 2.36, and the processor."""
    path = kept(tmp_path, platform=platform)
    found, refused = find(tmp_path)
    assert found == (path if fits else None)
    assert fits or f"{platform}, and this Python is {TAG}" in refused[path.name]


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


def summed(folder, *paths):
    """The folder, with the sums of these wheels as `sha256sum` writes them."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in paths
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


@contextlib.contextmanager
def served(folder):
    """The address of a server of these files."""
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(folder)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def all_kinds(folder):
    """Wheels for other machines around the one for this; the latter."""
    fitting = kept(folder, platform="manylinux_2_34_x86_64")
    others = [kept(folder, tensorflow=f"2.{minor}.0") for minor in (18, 19, 20)]
    others.append(kept(folder, platform="manylinux_2_34_aarch64"))
    others.append(kept(folder, platform="manylinux_2_39_x86_64"))
    for name in ("cp39-cp39", "cp314-cp314t"):
        others.append(folder / fitting.name.replace(f"{TAG}-{TAG}", name))
        shutil.copy(fitting, others[-1])
    summed(folder, *others[:3], fitting, *others[3:])
    return fitting


@pytest.mark.parametrize("is_address", [False, True], ids=["folder", "address"])
def test_of_a_folder_or_an_address_the_fitting_wheel_is_taken(
    tmp_path, host, capsys, is_address
):
    """Among those for other machines; without a compiler."""
    path = all_kinds(tmp_path)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(served(tmp_path)) if is_address else str(tmp_path)
        recipe.install_horovod(find_links=place)
    assert Path(host[-1][-1]).name == path.name
    printed = capsys.readouterr().out
    origin = f"{place.rstrip('/')}/{path.name}"
    assert f"is taken, and not built: {origin}" in printed
    assert printed.count("Not taken: ") == 7


def test_what_is_installed_is_the_file_that_was_checked(tmp_path, host, monkeypatch):
    """A copy of our own: the folder may change at any time."""
    path = kept(tmp_path)
    installed = []
    monkeypatch.setattr(
        recipe, "take", lambda found, _: installed.append(found.path.read_bytes())
    )
    original = path.read_bytes()
    recipe.install_horovod(find_links=summed(tmp_path, path))
    assert installed == [original]
    monkeypatch.setattr(recipe, "take", lambda found, _: installed.append(found.path))
    recipe.install_horovod(find_links=tmp_path)
    assert installed[-1].parent != tmp_path


def test_a_wheel_with_another_sum_is_an_error_and_nothing_is_installed(tmp_path, host):
    """Changed by one byte; both sums are shown."""
    path = kept(tmp_path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    summed(tmp_path, path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(InstallError, match="its SHA-256 sum differs") as error:
        recipe.install_horovod(find_links=tmp_path)
    assert path.name in str(error.value) and "Nothing was installed" in str(error.value)
    assert f"Received: {after} " in str(error.value) and before in str(error.value)
    assert host == []


def test_a_wheel_without_a_sum_is_not_taken(tmp_path, host):
    """`SHA256SUMS` says what is there."""
    kept(tmp_path)
    with pytest.raises(InstallError, match="No wheel of Horovod in .* fits"):
        recipe.install_horovod(find_links=summed(tmp_path))
    assert host == []


@pytest.mark.parametrize("is_address", [False, True], ids=["folder", "address"])
@pytest.mark.parametrize("missing", ["SHA256SUMS", "wheel"])
def test_a_place_that_cannot_be_read_is_an_error(tmp_path, host, is_address, missing):
    """It is named, and what was looked for; a build would hide a mistyped address."""
    path = kept(tmp_path)
    summed(tmp_path, path)
    gone = path if missing == "wheel" else tmp_path / "SHA256SUMS"
    gone.unlink()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(served(tmp_path)) if is_address else str(tmp_path)
        with pytest.raises(InstallError, match="`--find-links` must be") as error:
            recipe.install_horovod(find_links=place)
    expected = f"Received: {place.rstrip('/')}, of which {gone.name} cannot be read"
    assert expected in str(error.value)
    assert host == []


def test_without_a_fitting_wheel_horovod_is_built_and_the_output_says_so(
    tmp_path, host, monkeypatch, capsys
):
    """Where there is a compiler; where there is none, both are said."""
    other = kept(tmp_path, tensorflow="2.20.0")
    summed(tmp_path, other)
    with pytest.raises(InstallError) as error:
        recipe.install_horovod(find_links=tmp_path)
    assert f"No wheel of Horovod, of 1, in {tmp_path} fits" in str(error.value)
    assert "a C++ compiler" in str(error.value)
    assert host == []
    monkeypatch.setattr(recipe, "detect", lambda: FACTS)
    built = stand_in(tmp_path / "built")
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: built)
    capsys.readouterr()
    recipe.install_horovod(find_links=tmp_path)
    assert host[-1][-1] == str(built)
    printed = capsys.readouterr().out
    assert f"No wheel of Horovod, of 1, in {tmp_path} fits this" in printed
    assert "It is built." in printed


def test_a_kept_wheel_goes_before_those_of_others_and_what_is_built_is_kept(
    tmp_path, host, monkeypatch
):
    """With both options; the place of the others is then not even read."""
    own, others = tmp_path / "own", tmp_path / "others"
    both = {"wheel_dir": own, "find_links": others}
    (others).mkdir()
    monkeypatch.setattr(recipe, "detect", lambda: FACTS)
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: stand_in(tmp_path / "built"))
    summed(others)
    recipe.install_horovod(**both)
    assert len(list(own.glob("horovod-*.whl"))) == 1
    shutil.rmtree(others)
    monkeypatch.setattr(recipe, "build_wheel", lambda *_: pytest.fail("built again"))
    recipe.install_horovod(**both)
    assert str(host[-1][-1]).startswith(str(own))


def test_a_wheel_without_nccl_on_a_machine_with_gpus_is_said(
    tmp_path, host, monkeypatch, capsys
):
    """Unless the user has asked for it."""
    summed(tmp_path, kept(tmp_path))
    monkeypatch.setattr(recipe, "num_gpus", lambda: 2)
    recipe.install_horovod(find_links=tmp_path)
    assert "keras-dist install-horovod --nccl" in capsys.readouterr().out
    recipe.install_horovod(find_links=tmp_path, nccl=False)
    assert "GPUs" not in capsys.readouterr().out


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
    """The first one builds Horovod, for minutes; both import it, and the other trains.

    It takes the wheel where the first one has kept it, and by its sum.
    """
    source = str(Path(__file__).parents[2])
    command = ["-m", "keras_dist", "install-horovod", "--no-mpi", "--no-nccl"]
    folder = tmp_path / "wheels"
    env = os.environ | {"PYTHONPATH": source}
    first = environment_in(tmp_path / "first")
    subprocess.run([first, *command, "--wheel-dir", folder], env=env, check=True)
    summed(folder, *folder.glob("horovod-*.whl"))
    (tmp_path / "bin").mkdir()
    env |= {"PATH": str(tmp_path / "bin"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    env.pop("CXX", None)
    assert shutil.which("c++", path=env["PATH"]) is None
    for option in ("--wheel-dir", "--find-links"):
        second = environment_in(tmp_path / option)
        with measured(60):
            done = subprocess.run(
                [second, *command, option, folder],
                env=env,
                check=True,
                capture_output=True,
                text=True,
            )
        assert "is taken, and not built" in done.stdout
        assert "Gloo yes, MPI no, NCCL no" in done.stdout
        assert "It has keras_dist's patch" in done.stdout
        script = "import horovod; print(horovod.__file__)"
        where = subprocess.run(
            [second, "-P", "-c", script], capture_output=True, text=True
        )
        assert where.stdout.startswith(str(tmp_path / option))
        check = [second, "-m", "keras_dist", "check", "-np", "2"]
        subprocess.run(check, env=env, check=True)
