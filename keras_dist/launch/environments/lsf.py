"""LSF: `bsub` runs a command on the first host, with a file that names all of them.

`LSB_DJOB_HOSTFILE` has a line for each slot; `LSB_MCPU_HOSTS` has pairs of a host and
its slots. See IBM Spectrum LSF, "Environment variables".
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import HostList


class Lsf(HostList):
    """A job of IBM Spectrum LSF."""

    name: ClassVar[str] = "LSF"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the environment if its variables are there.

        >>> pairs = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 1"}
        >>> Lsf.detect(pairs).hosts
        {'a': 2, 'b': 1}
        """
        if "LSB_JOBID" not in environ:
            return None
        path = Path(environ.get("LSB_DJOB_HOSTFILE") or "/none")
        if path.is_file():
            hosts = Counter(path.read_text().split())
        else:
            words = environ.get("LSB_MCPU_HOSTS", "").split()
            pairs = zip(words[::2], words[1::2], strict=False)
            hosts = Counter({host: int(slots) for host, slots in pairs})
        return cls(hosts) if hosts else None
