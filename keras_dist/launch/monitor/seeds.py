"""Seed `random` and `numpy.random` alike on all ranks, before a script first draws."""

import os
import random
import zlib

# `keras-dist run` draws one for each job; other launchers give all ranks an id.
VARIABLE = "KERAS_DIST_SEED"
_IDS = "HOROVOD_GLOO_RENDEZVOUS_PORT PMIX_NAMESPACE OMPI_MCA_ess_base_jobid PMI_JOBID"


def seed_generators() -> None:
    """Seed both, unless the script has seeded NumPy's before."""
    import numpy as np  # noqa: PLC0415 - the launcher and `install-horovod` have none

    found = next(
        filter(None, map(os.environ.get, f"{_IDS} SLURM_JOB_ID".split())), None
    )
    given = os.environ.get(VARIABLE) or (found and str(zlib.crc32(found.encode())))
    if given and not given.strip().removeprefix("-").isdecimal():
        raise ValueError(
            f"{VARIABLE} must be a whole number. Received: {VARIABLE}={given}"
        )
    # A generator that was seeded by a number has no seed sequence.
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if given and generator.seed_seq is not None:
        random.seed(int(given))
        np.random.seed(int(given) % 2**32)
