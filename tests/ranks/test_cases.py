"""The rows of `docs/equivalence.md`: N ranks give what one process gives.

They are cases of one kind each, and the ways to train that keras.io shows. Of the ways,
weights, optimizers' state and logs are compared in float64, where rounding hides
nothing. `make test` has time for a part of both; LONG_TESTS=1 tests all ways, and `make
equivalence` runs all in each dtype on two and on three ranks.
"""

from dataclasses import replace

import pytest
from harness.cases import CASES, OPTIMIZERS, OTHERS, optimizer_names
from harness.keras_ways import WAYS

# Ways in `make test`, on two ranks: what a script does around `fit`, and steps with
# several networks. Losses and metrics have tests of their own.
ON_TWO = {
    "generative: GAN with two optimizers as attributes",
    "vision: transfer learning: frozen, then thawed and compiled again",
    "around fit: KeyboardInterrupt in the middle, and another fit",
    "random numbers: SpatialDropout1D, Dropout at each time, LSTM",
}

# With `batch="global"`, on three ranks.
GLOBAL_ON_THREE = {
    "around fit: schedules: cosine with warm-up, read at the scaled step",
    "random numbers: SpatialDropout1D, Dropout at each time, LSTM",
}


def rows():
    """Those that are tested, with the batch of each rank and with that of all ranks."""
    three, long = pytest.mark.three_ranks, pytest.mark.long
    for case in CASES:
        if case.tested:
            yield case, [three] if case.tested == "three" else []
        if case.is_shared_tested:
            yield case.shared, [three]
    for way in WAYS:
        title = f"{way.part}: {way.name}"
        yield way, [] if title in ON_TWO else [long]
        marks = [three] if title in GLOBAL_ON_THREE else [three, long]
        yield replace(way, is_global=True), marks


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "case", [pytest.param(row, id=row.title, marks=marks) for row, marks in rows()]
)
def test_a_row_equals_one_process(equals_one_process, case):
    """Weights, optimizers' state and logs; and the same bits on all ranks."""
    equals_one_process(case)


@pytest.mark.several_ranks
def test_every_optimizer_of_keras_is_tried():
    """What the newest Keras adds has to be added to the table."""
    assert optimizer_names() - OTHERS <= set(OPTIMIZERS)


def test_at_least_forty_ways_are_tried():
    """Each has a name of its own, also those that are chosen here."""
    titles = {f"{way.part}: {way.name}" for way in WAYS}
    assert len(titles) == len(WAYS) >= 40
    assert titles >= ON_TWO | GLOBAL_ON_THREE
