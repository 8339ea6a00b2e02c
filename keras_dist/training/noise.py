"""Noise of a rank's own in its steps, where the script gives an operation no seed."""

import contextlib
import random
from collections.abc import Iterator

import keras

from keras_dist import comm, private

_GOLDEN = 0x9E3779B9  # 2³² over the golden ratio: seeds of adjacent ranks differ much


class OwnNoise:
    """Numbers that `tf.random` and `keras.random` draw in the steps of one model.

    After `keras.utils.set_random_seed` every rank would draw the same noise for its own
    rows. Layers such as `Dropout` have generators, which `BroadcastVariables` seeds.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._generator: keras.random.SeedGenerator | None = None

    def prepare(self) -> None:
        """Make the generator; a step in which it is made would be traced once more."""
        if self._seed is None:
            self._seed = _draw_seed()
            self._generator = keras.random.SeedGenerator(self._seed)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Context manager in which a step is traced, or runs eagerly."""
        own, state = self._seed, private.keras_state()
        assert own is not None  # `prepare` was called before the first step
        before = state.get(private.SEED_GENERATOR)
        state[private.SEED_GENERATOR] = self._generator
        try:
            with private.change_operation_seed(lambda seed: (seed + own) % 2**31):
                yield
        finally:
            state[private.SEED_GENERATOR] = before


def _draw_seed() -> int:
    """Draw another seed for each model and each rank."""
    states = random.getstate()  # if Keras makes its generator now, it draws from here
    drawn = keras.random.randint((), 0, 2**30)  # the same on all ranks
    random.setstate(states)
    return (int(drawn) + comm.rank() * _GOLDEN) % 2**31
