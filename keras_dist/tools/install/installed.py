"""The installed Horovod: what it was built for."""

import json
import os
import subprocess
from dataclasses import dataclass

from keras_dist.launch import horovod_library
from keras_dist.tools.install.facts import HOROVOD, minor_of
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
    "mpi": bool(hvd.mpi_built()),
    "nccl": bool(hvd.nccl_built()),
    "cuda": tensorflow.sysconfig.get_build_info().get("cuda_version", ""),
}))
"""

_PATCHED = "It has keras_dist's patches."
_NOT_PATCHED = (
    "It was built without keras_dist's patches, or with others: on several hosts it "
    "takes the network of each host's own name, and sums on CPUs take longer. "
    "keras-dist install-horovod"
)


@dataclass(frozen=True)
class Built:
    """An installed Horovod.

    Args:
        horovod: Version of Horovod.
        built_for: Version of TensorFlow that it was built for.
        tensorflow: Version of TensorFlow that is installed.
        mpi: Whether it was built with MPI.
        nccl: Whether it was built with NCCL.
        cuda: Version of CUDA that TensorFlow was built for; empty for CPUs alone.
        is_patched: Whether it has keras_dist's patches.
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    mpi: bool
    nccl: bool
    cuda: str = ""
    is_patched: bool = False

    def __str__(self) -> str:
        transports = "Gloo" + ", MPI" * self.mpi + ", NCCL" * self.nccl
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.built_for}, with "
            f"{transports}.\n{_PATCHED if self.is_patched else _NOT_PATCHED}"
        )


def is_enough(installed: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Return True if an installed Horovod need not be built again for a request."""
    fits = minor_of(installed.built_for) == minor_of(installed.tensorflow)
    fits = fits and installed.horovod == HOROVOD and installed.is_patched
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
    values = json.loads(result.stdout.splitlines()[-1])
    return Built(**values, is_patched=horovod_library.is_installed()), ""
