"""How ranks of MPI exchange memory, where not every way is allowed."""

import os
import shutil
import subprocess
import sys

import pytest

from keras_dist.launch import mpi_memory, processes

# A process in which the kernel refuses one call, as in a container without its right.
FORBIDDEN = """
import ctypes, os, struct, sys
load, equal, answer = (0x20, 0, 0, 0), (0x15, 0, 1, 310), (6, 0, 0)
lines = [load, equal, (*answer, 0x50001), (*answer, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in lines))
start = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(start)) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
TRY = [sys.executable, "-I", "-S", "-c", mpi_memory._TRY]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its kernel")
def test_ranks_copy_memory_of_each_other_only_where_they_may(monkeypatch):
    """Else each message is an error of Open MPI."""
    allowed = subprocess.run(TRY, timeout=60)
    forbidden = subprocess.run([sys.executable, "-c", FORBIDDEN, *TRY], timeout=60)
    assert (allowed.returncode, forbidden.returncode) == (0, 1)
    monkeypatch.delenv(mpi_memory._COPY, raising=False)
    assert mpi_memory.copying() == {}
    monkeypatch.setattr(mpi_memory, "_can_copy", lambda: False)
    assert mpi_memory.copying() == {mpi_memory._COPY: "none"}
    monkeypatch.setenv(mpi_memory._COPY, "cma")
    assert mpi_memory.copying() == {}


def test_files_that_ranks_map_are_in_memory_only_where_they_fit(monkeypatch, tmp_path):
    """Docker gives a container 64 MB."""
    usage = shutil.disk_usage("/")
    space = usage._replace(free=64 << 20)
    monkeypatch.setattr(mpi_memory.shutil, "disk_usage", lambda path: space)
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    assert mpi_memory.parent_of_files(8) == tmp_path
    assert mpi_memory.parent_of_files(9) is None
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "none")
    assert mpi_memory.parent_of_files(2) is None
