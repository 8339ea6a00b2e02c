"""How ranks of MPI on one machine exchange memory."""

import shutil
from pathlib import Path

from keras_dist.launch import mpi, processes


def test_ranks_copy_through_shared_memory_unless_the_user_has_said(monkeypatch):
    """Not out of each other's memory, which some containers forbid."""
    monkeypatch.delenv(mpi._COPY, raising=False)
    monkeypatch.setattr(mpi, "XPMEM", Path("/none"))
    assert mpi.copying() == {mpi._COPY: "none"}
    monkeypatch.setattr(mpi, "XPMEM", Path("/"))
    assert mpi.copying() == {}
    monkeypatch.setattr(mpi, "XPMEM", Path("/none"))
    monkeypatch.setenv(mpi._COPY, "cma")
    assert mpi.copying() == {}


def test_files_that_ranks_map_are_in_memory_only_where_they_fit(monkeypatch, tmp_path):
    """Docker gives a container 64 MB."""
    usage = shutil.disk_usage("/")
    space = usage._replace(free=64 << 20)
    monkeypatch.setattr(mpi.shutil, "disk_usage", lambda path: space)
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    assert mpi.parent_of_files(8) == tmp_path
    assert mpi.parent_of_files(9) is None
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "none")
    assert mpi.parent_of_files(2) is None
