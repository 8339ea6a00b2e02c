"""Each way to train that keras.io shows gives what one process gives.

Weights, optimizers' state and logs are compared in float64, where rounding hides
nothing; some of them in float32, too. `make equivalence` runs all ways in both, and
lists them in `docs/equivalence.md`.
"""

import tempfile
from pathlib import Path

import pytest
from keras_ways import WAYS
from keras_ways.way import difference, digest, has_state, oracles

import keras_dist

# On three ranks; the others that ask for it run there in `make long`.
QUICK_ON_THREE = {
    "generative: GAN with two optimizers in a list",
    "contrast: siamese triplets, differentiated row by row",
    "text and speech: masked language model, weights of the words",
    "around fit: the guide's train step with sample weights and class weights",
}


# With `batch="global"`, on three ranks; `make long` runs the others.
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


@pytest.fixture(scope="module")
def folder():
    """A folder that all ranks have."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(keras_dist.broadcast(own))


@pytest.fixture(scope="module")
def expected(request, folder):
    """What one process leaves of each way; every rank computes some of them."""
    chosen = [
        tuple(item.callspec.params[name] for name in ("way", "dtype", "is_global"))
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    found = oracles(chosen, keras_dist.size(), folder)
    return {
        (way.title, dtype, is_global): arrays
        for (way, dtype, is_global), arrays in zip(chosen, found, strict=True)
    }


@pytest.mark.parametrize(("way", "dtype", "is_global"), cases())
def test_a_way_equals_one_process(world, expected, folder, way, dtype, is_global):
    """Weights, state and logs, and the same bits on all ranks."""
    run = way.run_of(world.size, folder, is_oracle=False, is_global=is_global)
    arrays = way.arrays(run, dtype)
    assert has_state(arrays), f"not all of its training is compared: {list(arrays)}"
    largest, name = difference(arrays, expected[way.title, dtype, is_global])
    assert largest <= way.tolerance(dtype), f"{name}: {largest:.1e}"
    assert len(set(keras_dist.gather(digest(arrays)))) == 1


def test_at_least_forty_ways_are_tried():
    """Each has a name of its own."""
    assert len({way.title for way in WAYS}) == len(WAYS) >= 40
    assert {way.title for way in WAYS if way.on_three} >= QUICK_ON_THREE
