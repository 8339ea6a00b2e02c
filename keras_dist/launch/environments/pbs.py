"""PBS: its job script runs on the first host, with a file that names all of them.

`PBS_NODEFILE` has a line for each process that was asked for (`mpiprocs`, `ppn`). See
the PBS Professional User's Guide, "Specifying number of MPI processes per chunk".
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import HostList


class Pbs(HostList):
    """A job of PBS, OpenPBS or Torque."""

    name: ClassVar[str] = "PBS"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        path = Path(environ.get("PBS_NODEFILE") or "/none")
        if "PBS_JOBID" not in environ or not path.is_file():
            return None  # or this is another host, where the file is not
        hosts = Counter(path.read_text().split())
        return cls(hosts) if hosts else None
