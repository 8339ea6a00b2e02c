"""One seed for what the scripts of all ranks draw, before a fit divides the data.

A script that sets no seed, and splits its data by `train_test_split(x, y)`, would split
it differently on each rank. So the generators of Python and NumPy start from a seed
that all ranks have in common. A script that seeds them itself is left alone.

This file imports nothing but the standard library and NumPy: a rank runs it before the
script's first line (`rank_process`).
"""

import contextlib
import functools
import hashlib
import importlib
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The seed of all ranks. `keras-dist run` draws one for each job, if it is not set.
VARIABLE = "KERAS_DIST_SEED"

# The process whose generators have been seeded; a process that it starts has another
# number.
_PROCESS = "KERAS_DIST_SEEDED_PROCESS"

# What other launchers give all ranks of a start in common, and no other start.
_COMMON = (
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)

# So many blocks of 624 numbers are followed, to see whether a state came from a seed.
_MOST_BLOCKS, _BLOCKS = 20_000, 1_000

_SEEDS_ITSELF = re.compile(r"seed\s*\(")


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


def seed_generators(*, is_before_script: bool = True) -> None:
    """Seed the generators of Python and NumPy with the seed of all ranks, once.

    Args:
        is_before_script: Whether the script has not begun. Else, where the import of
            the package is the first chance, a generator that the script has seeded is
            left alone.
    """
    seed = common_seed()
    if seed is None or os.environ.get(_PROCESS) == str(os.getpid()):
        return
    os.environ[_PROCESS] = str(os.getpid())
    with contextlib.suppress(ImportError):
        np: Any = importlib.import_module("numpy")  # a script may do without it
        # A generator that was seeded by a number has no seed sequence.
        is_plain = np.random.get_bit_generator().seed_seq is not None
        if is_before_script or is_plain:
            sequence = np.random.SeedSequence(seed)
            np.random.set_bit_generator(np.random.MT19937(sequence))
    if is_before_script or not _script_seeds():
        random.seed(seed)


@contextlib.contextmanager
def drawing_alone(rank: int) -> Iterator[None]:
    """Inside the block, this rank draws what no other one draws, such as noise.

    Only generators that `seed_generators` has seeded are changed. After the block the
    common ones go on, so that the next split of a script is the same on all ranks, too.

    Args:
        rank: This rank.
    """
    seed, np = common_seed(), sys.modules.get("numpy")
    with contextlib.ExitStack() as stack:
        if seed is not None and np is not None and _is_numpy_common(np, seed):
            drawn = int(np.random.randint(2**31))  # another one for each block
            stack.callback(np.random.set_bit_generator, np.random.get_bit_generator())
            own = np.random.SeedSequence([seed, rank, drawn])
            np.random.set_bit_generator(np.random.MT19937(own))
        if seed is not None and np is not None and _is_python_common(np, seed):
            drawn = random.getrandbits(31)
            stack.callback(random.setstate, random.getstate())
            random.seed(f"{seed} {rank} {drawn}")
        yield


def _is_numpy_common(np: Any, seed: int) -> bool:
    sequence = np.random.get_bit_generator().seed_seq
    return getattr(sequence, "entropy", None) == seed


def _is_python_common(np: Any, seed: int) -> bool:
    """Return whether Python's generator got to its state from the common seed.

    Python and NumPy have the same generator (Matsumoto and Nishimura, 1998), whose
    state is a block of 624 numbers: it is looked for in what the seed gives.
    """
    *now, _ = random.getstate()[1]
    return _comes_from(seed, tuple(now), np)


@functools.lru_cache(maxsize=8)  # the search takes 60 ms where the script has a seed
def _comes_from(seed: int, now: tuple[int, ...], np: Any) -> bool:
    *key, position = random.Random(seed).getstate()[1]
    if now == tuple(key):
        return True
    twister = np.random.MT19937()
    state = {"key": np.array(key, np.uint32), "pos": position}
    twister.state = {"bit_generator": "MT19937", "state": state}
    wanted = _tempered(np.array(now[:2], np.uint32))
    for _ in range(_MOST_BLOCKS // _BLOCKS):
        drawn = twister.random_raw(_BLOCKS * len(key)).reshape(_BLOCKS, len(key))
        if (drawn[:, :2] == wanted).all(axis=1).any():
            return True
    return False


def _tempered(words: Any) -> Any:
    """Return what the Mersenne Twister draws of words of its state."""
    words = words ^ (words >> 11)
    words = words ^ ((words << 7) & 0x9D2C5680)
    words = words ^ ((words << 15) & 0xEFC60000)
    return words ^ (words >> 18)


def _script_seeds() -> bool:
    """Return whether the script has a call of some `seed` function in it."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return bool(path and _SEEDS_ITSELF.search(Path(path).read_text()))
    except (OSError, ValueError):
        return False
