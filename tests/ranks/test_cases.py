"""The rows of `docs/equivalence.md`: N ranks give the state of one process."""

from pathlib import Path

import pytest
from cases import CASES, OPTIMIZERS, OTHERS, optimizer_names
from claims import assert_equal_to_the_bit, distribute_jobs

import keras_dist

pytestmark = pytest.mark.several_ranks


@pytest.fixture(scope="module")
def oracles(request):
    """What one process makes of each case; every rank computes some of them."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    size = keras_dist.size()
    states = distribute_jobs(
        [lambda c=case: c.state_of_one_process(size) for case in chosen]
    )
    return {case.title: state for case, state in zip(chosen, states, strict=True)}


def test_every_optimizer_of_keras_is_tried():
    """What the newest Keras adds has to be added to the table."""
    assert optimizer_names() - OTHERS <= set(OPTIMIZERS)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.title,
            marks=pytest.mark.three_ranks if case.tested == "three" else [],
        )
        for case in CASES
        if case.tested
    ]
    + [
        pytest.param(case.shared, id=case.shared.title, marks=pytest.mark.three_ranks)
        for case in CASES
        if case.is_shared_tested
    ],
)
def test_a_case_equals_one_process(world, oracles, case):
    """Weights and optimizer state, and the same bits on all ranks."""
    difference, tolerance, model = case.measure(world.size, oracles[case.title])
    assert_equal_to_the_bit(model)
    assert difference <= tolerance, f"{difference:.1e} > {tolerance:.1e}"
