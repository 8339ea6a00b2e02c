"""Our one change to Horovod's source, and whether the installed Horovod has it.

In Horovod 0.28.1 `GlooContext::InitializeForProcessSet` reads the network interface of
the new context, which is empty, and not that of the global one. All collectives go over
such contexts. So they ignore `HOROVOD_GLOO_IFACE` and use the address to which the
host's own name resolves there: the wrong network, or on Debian 127.0.1.1, to which no
other host can connect.
"""

import importlib.util
import shutil
from pathlib import Path

from keras_dist.install.failures import InstallError

FILE = "horovod/common/gloo/gloo_context.cc"

# Stands in the library if it was compiled from the changed source, as the text of a
# debug message of Horovod.
MARK = "keras_dist: process sets use the network interface "

_FIRST = """\
  attr device_attr;
"""
_REST = """\
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
"""
_ADDED = f"""\
  gloo_iface_ = global_context.gloo_iface_;
  LOG(DEBUG) << "{MARK}" << gloo_iface_;
"""


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source of Horovod into `folder`, and return its own folder there."""
    shutil.unpack_archive(archive, folder)
    return next(folder.glob("horovod-*"))


def apply(source: Path) -> None:
    """Change the source of Horovod.

    Args:
        source: The folder with its `setup.py`.

    Raises:
        InstallError: If the lines to change are not there exactly once.
    """
    path = source / FILE
    text = path.read_text() if path.is_file() else ""
    count = text.count(_FIRST + _REST)
    if count != 1:
        raise InstallError(
            "The source of Horovod is not the one that keras_dist's patch was made "
            f"for. Received: {count} places to change in {path}, instead of 1. "
            "Check which index or mirror pip uses with `pip config list`."
        )
    path.write_text(text.replace(_FIRST + _REST, _FIRST + _ADDED + _REST))


def is_patched(library: Path) -> bool:
    """Whether a library of Horovod was compiled from the changed source."""
    return MARK.encode() in library.read_bytes()


def installed_library() -> Path | None:
    """Horovod's library in this environment, without importing it; or `None`."""
    found = importlib.util.find_spec("horovod")
    for folder in (found and found.submodule_search_locations) or []:
        for library in Path(folder).glob("tensorflow/mpi_lib*.so"):
            return library
    return None


def is_installed() -> bool:
    """Whether the Horovod of this environment has the change; `False` if none is."""
    library = installed_library()
    return library is not None and is_patched(library)
