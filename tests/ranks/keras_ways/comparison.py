"""What tests of ways share: the results of one process, and the claim itself."""

import functools
import tempfile
from pathlib import Path

import pytest
from claims import distribute_jobs

import keras_dist
from keras_ways.way import difference, digest, has_state, train_plainly


@pytest.fixture(scope="module")
def ways_folder():
    """A folder that all ranks have."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(keras_dist.broadcast(own))


@pytest.fixture(scope="module")
def expected(request, ways_folder):
    """What one process leaves of each way; every rank computes some of them."""
    chosen = [
        tuple(item.callspec.params[name] for name in ("way", "dtype", "is_global"))
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    jobs = [
        functools.partial(train_plainly, *item, keras_dist.size(), ways_folder / f"{n}")
        for n, item in enumerate(chosen)
    ]
    found = distribute_jobs(jobs)
    return {
        (way.title, dtype, is_global): arrays
        for (way, dtype, is_global), arrays in zip(chosen, found, strict=True)
    }


@pytest.fixture
def equals_one_process(world, expected, ways_folder):
    """A function that compares weights, state, logs, and the bits of all ranks."""

    def compare(way, dtype, is_global):
        run = way.run_of(world.size, ways_folder, is_oracle=False, is_global=is_global)
        arrays = way.arrays(run, dtype)
        assert has_state(arrays), f"not all of its training is compared: {list(arrays)}"
        largest, name = difference(arrays, expected[way.title, dtype, is_global])
        assert largest <= way.tolerance(dtype), f"{name}: {largest:.1e}"
        assert len(set(keras_dist.gather(digest(arrays)))) == 1

    return compare
