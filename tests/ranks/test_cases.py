"""The rows of `docs/equivalence.md`: N ranks give the state of one process."""

import pytest
from cases import CASES, OPTIMIZERS, OTHERS, optimizer_names

pytestmark = pytest.mark.several_ranks


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
def test_a_case_equals_one_process(equals_one_process, case):
    """Weights and optimizer state, and the same bits on all ranks."""
    equals_one_process(case)
