"""Each way to train that keras.io shows gives what one process gives.

Weights, optimizers' state and logs are compared in float64, where rounding hides
nothing. `make test` has time for a part of them; LONG_TESTS=1 tests all, and `make
equivalence` runs all in each dtype on two and on three ranks, and lists them in
`docs/equivalence.md`.
"""

from dataclasses import replace

import pytest
from keras_ways import WAYS

# In `make test`, on two ranks: what a script does around `fit`, and steps with several
# networks. Losses and metrics have tests of their own.
ON_TWO = {
    "generative: GAN with two optimizers as attributes",
    "generative: diffusion with a moving average of the weights",
    "vision: transfer learning: frozen, then thawed and compiled again",
    "around fit: KeyboardInterrupt in the middle, and another fit",
}

ON_THREE = {"around fit: the guide's train step with sample weights and class weights"}

# With `batch="global"`, on three ranks.
GLOBAL_ON_THREE = {
    "text and speech: transformer with masks: a tag for each word",
    "around fit: schedules: cosine with warm-up, read at the scaled step",
}


def cases():
    """Each way, with the batch of each rank and with that of all ranks."""
    three, long = pytest.mark.three_ranks, pytest.mark.long
    for way in WAYS:
        title = f"{way.part}: {way.name}"
        marks = [three] if title in ON_THREE else []
        marks += [] if title in ON_TWO | ON_THREE else [long]
        yield pytest.param(way, id=way.title, marks=marks)
        shared = replace(way, is_global=True)
        marks = [three] if title in GLOBAL_ON_THREE else [three, long]
        yield pytest.param(shared, id=shared.title, marks=marks)


@pytest.mark.several_ranks
@pytest.mark.parametrize("case", cases())
def test_a_way_equals_one_process(equals_one_process, case):
    """Weights, state and logs, and the same bits on all ranks."""
    equals_one_process(case)


def test_at_least_forty_ways_are_tried():
    """Each has a name of its own, also those that are chosen here."""
    titles = {f"{way.part}: {way.name}" for way in WAYS}
    assert len(titles) == len(WAYS) >= 40
    assert titles >= ON_TWO | ON_THREE | GLOBAL_ON_THREE
