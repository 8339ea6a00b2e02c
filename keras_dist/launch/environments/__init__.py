"""What schedulers say in their variables: which hosts a job has, and which this one is.

Each environment is a class in a file of its own. To support another scheduler, write
one, add it to `ENVIRONMENTS`, and test it by its variables.
"""

import os
from collections.abc import Mapping

from keras_dist.launch.environments.environment import Environment
from keras_dist.launch.environments.kubernetes import IndexedJob
from keras_dist.launch.environments.slurm import Slurm
from keras_dist.launch.environments.torchrun import Torchrun

__all__ = ["ENVIRONMENTS", "Environment", "detect"]

# The first one that finds its variables counts: of several, the innermost.
ENVIRONMENTS = (Slurm, Torchrun, IndexedJob)


def detect(environ: Mapping[str, str] | None = None) -> Environment | None:
    """Return the environment of this process; `None` if no scheduler names hosts.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    found = (kind.detect(environ) for kind in ENVIRONMENTS)
    return next((each for each in found if each is not None), None)
