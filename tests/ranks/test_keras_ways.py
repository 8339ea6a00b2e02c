"""Each way to train that keras.io shows gives what one process gives.

Weights, optimizers' state and logs are compared in float64, where rounding hides
nothing; some of them in float32, too. `make equivalence` runs all ways in both, and
lists them in `docs/equivalence.md`.
"""

import pytest
from keras_ways import WAYS

pytest_plugins = ["keras_ways.comparison"]

# On three ranks; the others that ask for it run there with LONG_TESTS=1.
QUICK_ON_THREE = {
    "generative: GAN with two optimizers in a list",
    "contrast: siamese triplets, differentiated row by row",
    "text and speech: masked language model, weights of the words",
    "around fit: the guide's train step with sample weights and class weights",
}


# With `batch="global"`, on three ranks; LONG_TESTS=1 runs the others.
QUICK_GLOBAL = {
    "generative: GAN with two optimizers as attributes",
    "text and speech: transformer with masks: a tag for each word",
    "structured data: graph attention: the model is called with the whole graph",
    "around fit: schedules: cosine with warm-up, read at the scaled step",
    "around fit: batches of a PyDataset and of a generator",
}


def cases():
    """Each way, in each dtype that the tests have time for."""
    for way in WAYS:
        for dtype in way.dtypes:
            marks = [] if way.is_tested else [pytest.mark.long]
            marks += [] if way.on_one else [pytest.mark.several_ranks]
            if way.on_three:
                marks += [pytest.mark.three_ranks]
                is_quick = way.title in QUICK_ON_THREE and dtype == "float64"
                marks += [] if is_quick else [pytest.mark.slow_on_three]
            title = f"{way.title}, {dtype}"
            yield pytest.param(way, dtype, False, id=title, marks=marks)
        marks = [pytest.mark.several_ranks, pytest.mark.three_ranks]
        marks += [] if way.title in QUICK_GLOBAL else [pytest.mark.long]
        title = f'{way.title}, float64, batch="global"'
        yield pytest.param(way, "float64", True, id=title, marks=marks)


@pytest.mark.parametrize(("way", "dtype", "is_global"), cases())
def test_a_way_equals_one_process(equals_one_process, way, dtype, is_global):
    """Weights, state and logs, and the same bits on all ranks."""
    equals_one_process(way, dtype, is_global)


def test_at_least_forty_ways_are_tried():
    """Each has a name of its own."""
    assert len({way.title for way in WAYS}) == len(WAYS) >= 40
    assert {way.title for way in WAYS if way.on_three} >= QUICK_ON_THREE
