"""Random numbers of batches that the ranks evaluate, or predict, in turn.

One process draws for a batch after all batches before it. Rank r of N has the batches
r, r + N, …: before each of them, its generators skip what the others' batches draw.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.lines import warn
from keras_dist.training.metric_state import preserve_metrics
from keras_dist.training.metrics import list_metrics
from keras_dist.training.noise import StepNoise
from keras_dist.training.remember import list_variables, preserve_variables

# Of a generator without a seed, fewer draws than so many are found in a batch.
_MOST_DRAWS = 100_000

# The end of data.
_ENDS = StopIteration, tf.errors.OutOfRangeError


@dataclass(frozen=True)
class _Generator:
    """A generator of Keras, or a kernel of TensorFlow.

    Args:
        variable: Its state.
        kind: "seed"; "global" if functions without a seed draw from it; or "kernel", of
            which a shorter batch draws less.
        begun: The first state.
    """

    variable: Any
    kind: str
    begun: np.ndarray

    def state_after(self, count: int, state: np.ndarray | None = None) -> np.ndarray:
        """Return the state so many draws after another one, by default the first."""
        state = self.begun if state is None else state
        return private.skip_draws(state, count, is_global=self.kind == "global")

    def count(self, now: np.ndarray) -> int:
        """Count the draws from the first state to another one."""
        if self.kind != "global":
            return int(now[1] - self.begun[1])
        state = self.begun
        for count in range(_MOST_DRAWS):
            if np.array_equal(state, now):
                return count
            state = self.state_after(1, state)
        return 0

    def count_more(self, number: int, place: int, *, is_over: bool) -> int | None:
        """Count the draws beyond those of `place` batches; `None` if it is elsewhere.

        Args:
            number: Draws of a batch.
            place: Number of batches.
            is_over: Whether Keras has begun a step more at the end of the data, which
                may have drawn before it saw that there is no batch.
        """
        now = comm.to_array(self.variable)
        for more in (0, 1) if is_over else (0,):
            if np.array_equal(now, self.state_after(number * (place + more))):
                return number * more
        less = self.count(now) - number * place if self.kind == "kernel" else 0
        return less if less < 0 else None


class TurnDraws:
    """The random numbers of an evaluation, or a prediction, on all ranks.

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
        if not all(comm.gather(self.is_known)):  # one rank may have compiled it anew
            known.pop(name, None)

    @property
    def is_known(self) -> bool:
        """True if it is known how often a batch draws."""
        return self._name in self._known

    def find(self, run: Callable[[], Any], count: int) -> None:
        """Find how often a batch draws, by running `count` of them once more.

        All ranks call this, also one that has none.
        """
        if self.is_known:
            return
        variables = [*list_variables(self._model), *self._noise.list_places()]
        with (
            preserve_variables([*variables, *self._noise.list_states()]),
            preserve_metrics(list_metrics(self._model)),
        ):
            if count:
                run()
            now = _list_generators(self._model, self._noise)
        # A generator that was made in it has its first state again.
        self._generators = _list_generators(self._model, self._noise)
        own = [g.count(now[k].begun) for k, g in self._generators.items()]
        everyone = comm.gather([-(-n // max(1, count)) for n in own])
        # This rank's first batch may be the last of all, and shorter.
        most = map(max, itertools.zip_longest(*everyone, fillvalue=0))
        pairs = zip(self._generators, most, strict=False)
        self._known[self._name] = {key: number for key, number in pairs if number}

    def run(
        self,
        at_once: Callable[[], Any],
        one: Callable[[], Any] | None = None,
        count: int = 1,
    ) -> Any:
        """Run this rank's next batches, and return what the last one returns.

        Args:
            at_once: Runs `count` batches, or fewer at the end of the data.
            one: Runs one of them; by default that is the same.
            count: How many they are.
        """
        if not self._known.get(self._name):
            return at_once()
        if not self._steps:
            self._skip(comm.rank())
        self._count, result = count, None
        for number in range(count):
            try:
                result = (one or at_once)()
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
        place, is_over = 0, self._is_over
        if self._steps:
            place = comm.rank() + self._steps * comm.size()
        pairs = self._pairs()
        more = [g.count_more(n, place, is_over=is_over) for g, n in pairs]
        everyone = comm.gather((self._steps if has_rows else 0, more))
        total, is_even = sum(steps for steps, _ in everyone), True
        by_generator = zip(pairs, *(found for _, found in everyone), strict=False)
        for (generator, number), *found in by_generator:
            is_even &= None not in found
            known = [n for n in found if n is not None]
            count = number * total + sum(n for n in known if n < 0)
            if self._count == 1:  # as Keras's loop; several steps end with the data
                count += max([0, *known])
            generator.variable.assign(generator.state_after(count))
        if is_even:
            return
        self._known.pop(self._name, None)
        if comm.rank() == 0:
            warn(
                "The batches of an evaluation, or a prediction, do not draw as many "
                "random numbers each, so the ranks' are not those of one process. "
                f"Received: {self._model.name!r}."
            )

    def _pairs(self) -> list[tuple[_Generator, int]]:
        """List the generators, each with how often a batch draws from it."""
        known = self._known.get(self._name, {})
        return [(g, known.get(key, 0)) for key, g in self._generators.items()]

    def _skip(self, batches: int) -> None:
        for generator, number in self._pairs():
            if number:
                now = comm.to_array(generator.variable)
                generator.variable.assign(generator.state_after(number * batches, now))


def list_states(model: Any, noise: StepNoise) -> list[Any]:
    """List the states of all generators from which a model may draw."""
    return [each.variable for each in _list_generators(model, noise).values()]


def _list_generators(model: Any, noise: StepNoise) -> dict[int, _Generator]:
    variables = {
        "seed": [v for v in list_variables(model) if v.name == "seed_generator_state"],
        "global": noise.list_states(),
        "kernel": noise.list_places(),
    }
    return {
        id(variable): _Generator(variable, kind, comm.to_array(variable))
        for kind, found in variables.items()
        for variable in found
    }
