"""The Horovod that is installed: for what it was built, and whether it is enough."""

import json
import os
import subprocess
from dataclasses import dataclass

from keras_dist.launch import horovod_library
from keras_dist.tools.install.flags import HOROVOD
from keras_dist.tools.install.steps import PYTHON

# Run in a new interpreter. Its last line of output describes the installed Horovod.
_PROBE = """
import json, pathlib
import horovod, tensorflow
import horovod.tensorflow as hvd
metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
print()
print(json.dumps({
    "horovod": horovod.__version__,
    "built_for": json.loads(metadata.read_text()).get("tensorflow"),
    "tensorflow": tensorflow.__version__,
    "gloo": bool(hvd.gloo_built()),
    "mpi": bool(hvd.mpi_built()),
    "nccl": bool(hvd.nccl_built()),
}))
"""

_PATCHED = (
    "It has keras_dist's patches: between hosts everything goes over the network that "
    "is named, whatever a host's own name resolves to; a collective begins as soon as "
    "the ranks have its tensor; and on CPUs its result takes the place of the tensor, "
    "and ranks of one host sum large tensors without sockets."
)
_NOT_PATCHED = (
    "It was built elsewhere, without keras_dist's patches: on several hosts each "
    "host's own name has to resolve there to the address by which the others reach it, "
    "and collectives on CPUs take longer. `keras-dist install-horovod` builds it with "
    "them."
)


@dataclass(frozen=True)
class Built:
    """An installed Horovod.

    Args:
        horovod: Version of Horovod.
        built_for: Version of TensorFlow that it was built for.
        tensorflow: Version of TensorFlow that is installed.
        gloo: Whether it was built with Gloo.
        mpi: Whether it was built with MPI.
        nccl: Whether it was built with NCCL.
        is_patched: Whether it has keras_dist's change (see `patch`).
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    gloo: bool
    mpi: bool
    nccl: bool
    is_patched: bool = False

    def __str__(self) -> str:
        transports = (("Gloo", self.gloo), ("MPI", self.mpi), ("NCCL", self.nccl))
        text = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in transports)
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.tensorflow}: {text}."
            f"\n{_PATCHED if self.is_patched else _NOT_PATCHED}"
        )


def is_enough(installed: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Whether an installed Horovod need not be built again.

    Args:
        installed: The installed Horovod.
        mpi: Whether MPI is requested.
        nccl: Whether NCCL is requested.
    """
    fits = installed.horovod == HOROVOD and installed.built_for == installed.tensorflow
    fits = fits and installed.is_patched
    return fits and installed.mpi >= bool(mpi) and installed.nccl >= bool(nccl)


def probe() -> tuple[Built | None, str]:
    """Import Horovod in a new interpreter.

    Returns:
        The installed Horovod, or `None` and the end of the error message.
    """
    result = subprocess.run(
        [*PYTHON, "-c", _PROBE],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        return None, "\n".join(result.stderr.splitlines()[-5:])
    found = json.loads(result.stdout.splitlines()[-1])
    return Built(**found, is_patched=horovod_library.is_installed()), ""
