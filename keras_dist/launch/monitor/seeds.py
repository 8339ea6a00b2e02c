"""One seed for what the scripts of all ranks draw, before a fit divides the data.

A script that sets no seed, and splits its data by `train_test_split(x, y)`, would split
it differently on each rank. So the generators of Python and NumPy start from a seed
that all ranks have in common. A script that seeds NumPy's itself is left alone.

This file imports nothing but the standard library and NumPy: a rank runs it before the
script's first line (`rank_process`).
"""

import contextlib
import hashlib
import importlib
import os
import random
import re
from collections.abc import Iterator
from typing import Any

# The seed of all ranks. `keras-dist run` draws one for each job, if it is not set.
VARIABLE = "KERAS_DIST_SEED"

# What other launchers give all ranks of a start in common, and no other start.
_COMMON = (
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)


def common_seed() -> int | None:
    """Return the seed of all ranks; `None` if no launcher started this process.

    Raises:
        ValueError: If `KERAS_DIST_SEED` is not a whole number.
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not re.fullmatch(r"-?\d+", given.strip()):
            raise ValueError(
                f"{VARIABLE} must be a whole number: the seed from which the scripts "
                f"of all ranks draw. Received: {VARIABLE}={given}"
            )
        return int(given) % 2**32
    for names in _COMMON:
        if names[0] in os.environ:
            text = " ".join(os.environ.get(name, "") for name in names)
            return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    return None


def seed_generators() -> None:
    """Seed the generators of Python and NumPy with the seed of all ranks, once."""
    seed = common_seed()
    with contextlib.suppress(ImportError):
        np: Any = importlib.import_module("numpy")  # a script may do without it
        # A generator that was seeded by a number has no seed sequence.
        sequence = np.random.get_bit_generator().seed_seq
        if seed is not None and sequence is not None and sequence.entropy != seed:
            random.seed(seed)
            common = np.random.MT19937(np.random.SeedSequence(seed))
            np.random.set_bit_generator(common)


@contextlib.contextmanager
def drawing_alone(rank: int) -> Iterator[None]:
    """Context manager in which this rank draws what no other one draws, such as noise.

    After it the common generators go on, so that the next split of a script is the same
    on all ranks, too. Where the script has seeded NumPy's, nothing is changed.

    Args:
        rank: This rank.
    """
    seed, np = common_seed(), importlib.import_module("numpy")
    before = np.random.get_bit_generator()
    if seed is None or getattr(before.seed_seq, "entropy", None) != seed:
        yield
        return
    drawn = random.getrandbits(32)  # another one for each block
    state = random.getstate()
    random.seed(f"{seed} {rank} {drawn}")
    own = np.random.SeedSequence([seed, rank, drawn])
    np.random.set_bit_generator(np.random.MT19937(own))
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_bit_generator(before)
