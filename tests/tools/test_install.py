"""`keras-dist install-horovod`: its decisions and messages, without a build."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest
from harness.launching import ROOT, launch

from keras_dist import version
from keras_dist.tools.install import build, facts, recipe, steps

NCCL = facts.Nccl(Path("/opt/n c/include"), Path("/opt/n c/lib/libnccl.so.2"))
CUDA = Path("/usr/local/cuda")
COMPLETE = facts.Facts("2.20.0", has_open_mpi=True, cuda_home=CUDA, nccl=NCCL)
LACKS = dict.fromkeys(("has_pip", "has_compiler", "has_make"), False)
BARE = facts.Facts(None, distribution="tensorflow-cpu", **LACKS)
CHOICES = [facts.Choice(*pair) for pair in itertools.product((False, True), repeat=2)]


def environment(choice=CHOICES[0], environ=None, nccl=NCCL):
    """The environment of a build in /t."""
    found = dataclasses.replace(COMPLETE, nccl=nccl)
    return build.build_environment(environ or {}, found, choice, Path("/t"))


def make_files(folder, *names):
    """Empty files, with their folders."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """No CUDA and no NCCL but in the user's folder and in wheels, both of the test."""
    monkeypatch.setenv("PATH", "")
    for name in ("HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NCCL_HOME", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "mine"))
    monkeypatch.setattr(facts, "_SYSTEM_HOMES", ())
    monkeypatch.setattr(facts, "_wheels", lambda: tmp_path / "wheels")
    return tmp_path / "mine", tmp_path / "wheels"


def test_another_source_of_horovod_is_not_run(tmp_path, monkeypatch):
    """One that an index or a mirror has under its name: it is not unpacked either."""
    source, index, folder = (tmp_path / name for name in ("source", "index", "build"))
    make_files(source / "horovod-0.28.1", "PKG-INFO")
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')"
    (source / "horovod-0.28.1" / "setup.py").write_text(code)
    shutil.make_archive(str(index / "horovod-0.28.1"), "gztar", source)
    folder.mkdir()
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    download = [*steps.PIP, "download", "--no-deps", "--no-build-isolation"]
    with pytest.raises(RuntimeError, match="DO NOT MATCH THE HASHES"):
        build.fetch_source(folder, download, steps.Steps(), env)
    assert not (tmp_path / "was-run").exists() and not (folder / "source").exists()


@pytest.mark.parametrize("name", ["lib/libnccl.so.2", "lib64/libnccl.so"])
def test_nccl_is_found_with_either_name_of_its_library(homes, name):
    """PyPI's wheel has only `libnccl.so.2`; a header or a library alone is none."""
    mine, wheels = homes
    make_files(mine, name)
    assert facts.find_nccl() is None
    home = make_files(wheels / "nccl", "include/nccl.h", name)
    assert facts.find_nccl() == facts.Nccl(home / "include", home / name)
    make_files(mine, "include/nccl.h")  # the user's own wins
    assert facts.find_nccl() == facts.Nccl(mine / "include", mine / name)


def test_nvcc_counts_only_if_it_runs_and_has_headers(homes):
    """Wrapper scripts, broken compilers and the assembler's wheel are no toolkit."""
    mine, wheels = homes
    for home, output in ((mine, "no such driver"), (wheels / "cu13", "release 13.0")):
        make_files(home, "bin/nvcc")
        (home / "bin/nvcc").write_text(f"#!/bin/sh\necho {output}\n")
        (home / "bin/nvcc").chmod(0o755)
    assert facts.find_cuda() is None
    for home in (mine, wheels / "cu13"):
        make_files(home, "include/cuda_runtime.h")
    assert facts.find_cuda() == wheels / "cu13"
    (mine / "bin/nvcc").write_text("#!/bin/sh\necho release 12.4\n")
    assert facts.find_cuda() == mine


def test_each_thing_that_is_missing_is_named_with_what_installs_it():
    """All at once; what is not requested is not missing."""
    missing = facts.find_missing(BARE, mpi=True, nccl=True)
    text = "\n".join(missing)
    python = version.format_version(sys.version_info[:2])
    assert f"TensorFlow, 2.18 to 2.21. Received: none for Python {python}." in text
    for package in ("python3-venv", "g++", "make", "libopenmpi-dev openmpi-bin"):
        assert f"apt-get install {package}" in text
    assert "nvidia-nccl-cu12" in text
    assert f"pip install '{facts.CUDA}'" in text
    assert len(missing) == 8
    for mpi, nccl in itertools.product((False, True), repeat=2):
        assert facts.find_missing(COMPLETE, mpi=mpi, nccl=nccl) == []
    old = dataclasses.replace(COMPLETE, tensorflow="2.17.1")
    (one,) = facts.find_missing(old, mpi=False, nccl=False)
    assert "pip install 'tensorflow>=2.18" in one
    # Its library lacks a symbol that Horovod's GPU code needs.
    cpu = dataclasses.replace(COMPLETE, distribution="tensorflow-cpu")
    (one,) = facts.find_missing(cpu, mpi=False, nccl=True)
    assert "`tensorflow`. Received: `tensorflow-cpu`." in one
    assert "pip install tensorflow==2.20.0" in one


def test_an_environment_without_pip_runs_the_one_of_ensurepip(monkeypatch):
    """As in environments of uv; it is not installed."""
    (installed,) = subprocess.run(
        [*steps.PIP, "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert str(Path(sys.prefix)) in installed
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = steps.find_pip()
    assert path and path.endswith(".whl/pip")
    command = [*steps.PYTHON, path, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert path in done.stdout


@pytest.mark.parametrize("name", version.TENSORFLOWS)
def test_each_distribution_of_tensorflow_is_found(name, monkeypatch):
    """Alone in its environment; and an error at import names it to pip."""

    def version_of(asked):
        if asked != name:
            raise PackageNotFoundError(asked)
        return "2.17.1"

    monkeypatch.setattr("importlib.metadata.version", version_of)
    assert version.installed_tensorflow() == (name, "2.17.1")
    with pytest.raises(ImportError, match=rf"pip install '{name}>=2\.18'"):
        version.require("TensorFlow", "2.17.1", version.FIRST_TENSORFLOW)


def test_a_compiler_that_cxx_names_wrongly_is_missing(monkeypatch):
    """Another compiler on the PATH is not tried."""
    monkeypatch.setenv("CXX", "ccache-14 g++")
    assert not facts.detect().has_compiler


def test_parts_that_are_not_requested_are_built_if_they_are_found():
    """`None` follows the facts; yes and no do not."""
    plain = facts.Facts(tensorflow="2.20.0")
    for mpi, nccl in itertools.product((False, True), repeat=2):
        for found in (plain, COMPLETE):
            assert facts.choose(found, mpi=mpi, nccl=nccl) == facts.Choice(mpi, nccl)
    assert facts.choose(plain, mpi=None, nccl=None) == facts.Choice(False, False)
    assert facts.choose(COMPLETE, mpi=None, nccl=None) == facts.Choice(True, True)
    cpu = dataclasses.replace(COMPLETE, distribution="tensorflow-cpu")
    assert facts.choose(cpu, mpi=None, nccl=None) == facts.Choice(True, False)
    no_nvcc = dataclasses.replace(COMPLETE, cuda_home=None)
    for is_build in (True, False):  # a wheel needs none
        choice = facts.choose(no_nvcc, mpi=None, nccl=None, is_build=is_build)
        assert choice.nccl == (not is_build)


def test_the_users_settings_are_used_unless_they_contradict_the_choice():
    """Ours come after the user's flags, and the tools before the user's folders."""
    mine = {"CXXFLAGS": "-g", "LDFLAGS": "-L/x", "MAKEFLAGS": "-j1", "PATH": "/usr/bin"}
    mine |= {"HOROVOD_BUILD_CUDA_CC_LIST": "80", "PYTHONPATH": "/mine"}
    env = environment(environ=mine | {"HOROVOD_GPU_ALLREDUCE": "NCCL"})
    # The shell that make starts takes the inner quotes away.
    flag = "-DTENSORFLOW_VERSION=(__LINE__==23?0:2018000000)"
    assert shlex.split(env["CXXFLAGS"]) == ["-g", flag]
    assert env["LDFLAGS"] == "-L/x -Wl,-s"
    assert env["MAKEFLAGS"] == "-j1"
    assert env["HOROVOD_BUILD_CUDA_CC_LIST"] == "80"
    assert env["PATH"] == "/t/tools/bin:/usr/bin"
    assert env["PYTHONPATH"] == "/t/tools:/mine"
    assert "HOROVOD_GPU_ALLREDUCE" not in env
    for choice in CHOICES:  # without a setting CMake would use what it finds
        env = environment(choice)
        assert env["HOROVOD_WITH_GLOO"] == env["HOROVOD_WITH_TENSORFLOW"] == "1"
        assert ("HOROVOD_WITH_MPI" in env) == choice.mpi
        assert ("HOROVOD_WITHOUT_MPI" in env) != choice.mpi
        assert (env.get("HOROVOD_GPU_OPERATIONS") == "NCCL") == choice.nccl
        assert env["MAKEFLAGS"] == f"-j{len(os.sched_getaffinity(0))}"


def test_nccl_is_found_at_run_time_in_its_own_folder():
    """The linker gets the folder, also with a space in it, and no temporary one."""
    env = environment(facts.Choice(nccl=True))
    assert shlex.split(env["LDFLAGS"]) == ["-Wl,-s", "-Wl,-rpath,/opt/n c/lib"]
    assert env["HOROVOD_NCCL_HOME"] == "/t/nccl"
    assert env["PATH"].split(":")[:2] == ["/t/tools/bin", "/usr/local/cuda/bin"]
    assert "rpath" not in environment()["LDFLAGS"]


def test_the_linker_gets_nccl_under_a_name_that_it_knows(tmp_path):
    """A script that names the library, and the headers beside it."""
    wheel = make_files(tmp_path / "w", "include/nccl.h", "lib/libnccl.so.2")
    library = wheel / "lib/libnccl.so.2"
    build.link_nccl(facts.Nccl(wheel / "include", library), tmp_path / "home")
    script = (tmp_path / "home/lib/libnccl.a").read_text()
    assert script == f'INPUT("{wheel}/lib/libnccl.so.2")\n'
    assert (tmp_path / "home/include/nccl.h").samefile(wheel / "include/nccl.h")


def test_nvcc_gets_the_libraries_of_cudas_wheels_where_it_looks(tmp_path):
    """In `bin/../lib64` and `bin/../lib`, by the kernel's reading of these paths."""
    wheels = make_files(
        tmp_path / "nvidia/cu13",
        *("bin/nvcc", "bin/crt/link.stub", "include/cuda_runtime.h", "nvvm/bin/cicc"),
        *("lib/libcudart_static.a", "lib/libcudart.so.13", "lib/libcudadevrt.a"),
    )
    home = build.link_cuda(wheels, tmp_path / "home")
    assert home == tmp_path / "home"
    for folder, name in itertools.product(
        ("lib64", "lib"), ("libcudart_static.a", "libcudart.so.13", "libcudadevrt.a")
    ):
        assert (home / "bin/.." / folder / name).samefile(wheels / "lib" / name)
    assert (home / "lib64/libcudart.so").samefile(wheels / "lib/libcudart.so.13")
    for name in ("bin/crt/link.stub", "include/cuda_runtime.h", "nvvm/bin/cicc"):
        assert (home / "bin/.." / name).samefile(wheels / name)


def test_a_failure_shows_the_end_and_names_the_log(capsys):
    """The first error, and twenty lines."""
    code = (
        "print('a.cc:1:2: error: first', *range(100), sep='\\n'); raise SystemExit(2)"
    )
    run = steps.Steps()
    with pytest.raises(RuntimeError) as found:
        run.run("It", [*steps.PYTHON, "-c", code])
    assert capsys.readouterr().out == "It ...\n"
    lines = [line.strip() for line in str(found.value).splitlines()]
    assert lines[0].startswith("It failed.")
    assert lines[1:-1] == ["a.cc:1:2: error: first", *map(str, range(80, 100))]
    assert lines[-1] == f"The whole output is in {run.log}"
    assert not run.try_to_run("It", [*steps.PYTHON, "-c", code])
    assert "\n50\n" in run.log.read_text()


BUILT = recipe.Built(
    "0.28.1", "2.21.0", "2.21.0", mpi=False, nccl=False, is_patched=True
)


@pytest.mark.parametrize(
    ("changed", "mpi", "nccl", "is_enough"),
    [
        ({}, None, None, True),
        ({}, False, False, True),
        ({}, True, None, False),
        ({}, None, True, False),
        ({"mpi": True, "nccl": True}, True, False, True),
        ({"is_patched": False}, None, None, False),
        *(({f: "2.20.0"}, None, None, False) for f in ("tensorflow", "built_for")),
        *(({f: "2.21.1"}, None, None, True) for f in ("tensorflow", "built_for")),
        ({"horovod": "2.20.0"}, None, None, False),
        ({"built_for": None}, None, None, False),
    ],
)
def test_a_horovod_is_enough_if_it_fits_tensorflow_and_has_the_requested_parts(
    changed, mpi, nccl, is_enough
):
    """Additional parts are fine; another TensorFlow or Horovod is not."""
    built = dataclasses.replace(BUILT, **changed)
    assert recipe.is_enough(built, mpi=mpi, nccl=nccl) == is_enough


PATCHES = {path.stem: path.read_text() for path in build.patch_files()}
GLOO = "horovod/common/gloo/gloo_context.cc"


@pytest.mark.parametrize("count", [0, 2])
def test_another_source_is_not_patched(tmp_path, count):
    """One that has changed must not be built as if it were ours."""
    patch = PATCHES["gloo_interface"]
    lines = patch.partition("\n@@ ")[2].splitlines()[1:]
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    (make_files(tmp_path, GLOO) / GLOO).write_text(before * count)
    with pytest.raises(RuntimeError, match=f"Received: {count} places to change"):
        build.apply(tmp_path, patch)


def test_each_patch_is_one_that_other_programs_take_too(tmp_path):
    """The numbers of lines in its header are right, and its reason stands first."""
    for text in PATCHES.values():
        pattern = r"^@@ -\d+,(\d+) \+\d+,(\d+) @@\n(.*)\Z"
        (hunk,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        lines = hunk[2].splitlines()
        sides = [[n for n in lines if n[:1] != sign] for sign in "+-"]
        assert [int(n) for n in hunk[:2]] == [len(side) for side in sides]
        before, after = ("".join(f"{n[1:]}\n" for n in side) for side in sides)
        name = re.search(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)[1]
        file = make_files(tmp_path, name) / name
        file.write_text(f"a\n{before}z\n")
        assert build.apply(tmp_path, text).endswith(".")
        assert file.read_text() == f"a\n{after}z\n"


def test_without_tensorflow_the_command_says_which_package_to_install(tmp_path):
    """Without a traceback. And the package can be imported: its use is an error."""
    (tmp_path / "psutil").symlink_to(Path(psutil.__file__).parent)
    paths = f"PYTHONPATH={ROOT}{os.pathsep}{tmp_path}", f"PATH={os.environ['PATH']}"
    # Without other variables, and without the other packages of the environment.
    python = ["env", "-i", *paths, sys.executable, "-S"]
    done = launch([*python, "-m", "keras_dist", "install-horovod"])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("keras-dist: Horovod cannot be installed here.")
    assert "Traceback" not in done.stderr
    assert "pip install 'tensorflow>=2.18,<2.22'" in done.stderr
    done = launch([*python, "-c", "import keras_dist; keras_dist.dist_fit"])
    assert "without tensorflow and keras. Run: pip install" in done.stderr


@pytest.mark.parametrize(
    "names",
    [
        ("lib64/libcudart.so", "lib64/libcudart.so.13"),  # NVIDIA's own
        ("lib/x86_64-linux-gnu/libcudart.so",),  # Debian's, in /usr
    ],
)
def test_any_other_toolkit_is_left_as_it_is(names, tmp_path):
    """Nothing is linked."""
    toolkit = make_files(tmp_path / "cuda", "bin/nvcc", *names)
    assert build.link_cuda(toolkit, tmp_path / "home") == toolkit
    assert not (tmp_path / "home").exists()


def test_a_build_is_no_success_if_another_horovod_is_imported(tmp_path, monkeypatch):
    """It comes first in Python's search path, and has no version of ours beside it."""
    installed, _ = recipe.probe()
    assert installed.is_patched
    with monkeypatch.context() as another_package:
        another_package.setattr(build, "CXX_FLAG", "-O3")
        assert not recipe.probe()[0].is_patched
    (tmp_path / "horovod").symlink_to(installed.folder)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(recipe, "detect", lambda: COMPLETE)
    monkeypatch.setattr(recipe, "build_and_install", lambda *_: None)
    with pytest.raises(RuntimeError, match=f"is imported: {tmp_path}/horovod"):
        recipe.install_horovod(mpi=False, nccl=False)
