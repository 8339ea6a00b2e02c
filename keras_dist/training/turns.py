"""Random numbers of batches that the ranks evaluate, or predict, in turn.

One process draws for a batch after all batches before it. Rank r of N has the batches
r, r + N, …: before each of them, its generators skip what the others' batches draw.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.lines import warn
from keras_dist.training.metric_state import preserve_metrics
from keras_dist.training.metrics import stateful_metrics
from keras_dist.training.noise import StepNoise
from keras_dist.training.remember import list_variables, preserve_variables

# Of a generator without a seed, fewer draws than so many are found in a batch.
_MOST_DRAWS = 100_000

# The end of data.
_ENDS = StopIteration, tf.errors.OutOfRangeError


@dataclass(frozen=True)
class _Generator:
    """A generator of Keras.

    Args:
        variable: Its state.
        is_global: Whether functions without a seed draw from it.
        begun: The first state.
    """

    variable: Any
    is_global: bool
    begun: np.ndarray

    def state_after(self, count: int, state: np.ndarray | None = None) -> np.ndarray:
        """Return the state so many draws after another one, by default the first."""
        state = self.begun if state is None else state
        return private.skip_draws(state, count, is_global=self.is_global)

    def count(self, now: np.ndarray) -> int:
        """Count the draws from the first state to another one."""
        if not self.is_global:
            return int(now[1] - self.begun[1])
        state = self.begun
        for count in range(_MOST_DRAWS):
            if np.array_equal(state, now):
                return count
            state = self.state_after(1, state)
        return 0


class TurnDraws:
    """What a model draws in one evaluation, or prediction, on all ranks.

    How often a batch draws is found by running this rank's first one, which is taken
    back, and is known from then on: all batches have to draw as often.

    Args:
        model: The model.
        noise: Has the generators of functions without a seed.
        known: Its entry `name` has for each generator that draws, by the id of its
            state, how often a batch does; without the entry, that is found.
        name: Of the function that runs a batch.
    """

    def __init__(
        self, model: Any, noise: StepNoise, known: dict[str, dict[int, int]], name: str
    ) -> None:
        self._model, self._noise, self._known, self._name = model, noise, known, name
        self._generators = _list_generators(model, noise)
        self._steps, self._count, self._is_over = 0, 1, False

    @property
    def is_known(self) -> bool:
        """True if it is known how often a batch draws."""
        return self._name in self._known

    def find(self, run: Callable[[], Any], count: int) -> None:
        """Find how often a batch draws, by running `count` of them once more."""
        if self.is_known or not count:
            return
        variables = list_variables(self._model)
        with (
            preserve_variables([*variables, *self._noise.list_states()]),
            preserve_metrics(stateful_metrics(self._model.metrics)),
        ):
            run()
            now = _list_generators(self._model, self._noise)
        # A generator that was made in it has its first state again.
        self._generators = _list_generators(self._model, self._noise)
        draws = {k: g.count(now[k].begun) for k, g in self._generators.items()}
        self._known[self._name] = {k: -(-n // count) for k, n in draws.items() if n}

    def run(
        self, at_once: Callable[[], Any], one: Callable[[], Any], count: int = 1
    ) -> Any:
        """Run this rank's next batches, and return what the last one returns.

        Args:
            at_once: Runs `count` batches, or fewer at the end of the data.
            one: Runs one of them.
        """
        if not self._known.get(self._name):
            return at_once()
        if not self._steps:
            self._skip(comm.rank())
        self._count, result = count, None
        for number in range(count):
            try:
                result = one()
            except _ENDS:
                if not number:
                    self._is_over = True
                    raise
                break
            self._steps += 1
            self._skip(comm.size() - 1)
        return result

    def finish(self, *, has_rows: bool) -> None:
        """Let the generators go on as after the batches of all ranks, which call this.

        Args:
            has_rows: `False` if this rank's batches were copies of another's.
        """
        place = comm.rank() + self._steps * comm.size() if self._steps else 0
        is_even = self._is_at(place)
        # Where Keras does not know the number of batches, it begins a step more at the
        # end, which has drawn before it sees that there is no batch.
        is_beyond = self._is_over and not is_even and self._is_at(place + 1)
        own = self._steps if has_rows else 0, is_beyond and self._count == 1
        steps, are_beyond = zip(*comm.gather(own), strict=True)
        total = sum(steps) + any(are_beyond)
        for generator, number in self._pairs():
            generator.variable.assign(generator.state_after(number * total))
        if not (is_even or is_beyond):
            self._known.pop(self._name, None)
            warn(
                "The batches of an evaluation, or a prediction, do not draw as many "
                "random numbers each, so the ranks' are not those of one process. "
                f"Received: {self._model.name!r}."
            )

    def _pairs(self) -> list[tuple[_Generator, int]]:
        """List the generators, each with how often a batch draws from it."""
        known = self._known.get(self._name, {})
        return [(g, known.get(key, 0)) for key, g in self._generators.items()]

    def _is_at(self, place: int) -> bool:
        """Return True if all generators are where so many batches have drawn."""
        return all(
            np.array_equal(comm.to_array(g.variable), g.state_after(number * place))
            for g, number in self._pairs()
        )

    def _skip(self, batches: int) -> None:
        for generator, number in self._pairs():
            if number:
                now = comm.to_array(generator.variable)
                generator.variable.assign(generator.state_after(number * batches, now))


@contextlib.contextmanager
def preserve_states(model: Any, noise: StepNoise) -> Iterator[None]:
    """Context manager after which the generators of Keras go on as without it."""
    generators = _list_generators(model, noise).values()
    try:
        yield
    finally:
        for generator in generators:
            generator.variable.assign(generator.begun)


def _list_generators(model: Any, noise: StepNoise) -> dict[int, _Generator]:
    own = [v for v in list_variables(model) if v.name == "seed_generator_state"]
    shared = noise.list_states()
    return {
        id(v): _Generator(v, any(v is each for each in shared), comm.to_array(v))
        for v in (*own, *shared)
    }
