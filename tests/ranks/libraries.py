"""Models of libraries train on all ranks as on one process.

Not a file that pytest finds by itself: `make libraries` names it, since it needs these
libraries. The ways with `on_three` run on three ranks, the others on two; with
LONG_TESTS each runs on both.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from harness.claims import warned
from harness.keras_ways.way import Run
from harness.library_ways import WAYS
from harness.library_ways.hub import mixtral, train_tokens

import keras_dist

_IS_LONG = "LONG_TESTS" in os.environ


def cases():
    """Each way, with the batch of each rank and with that of all ranks."""
    for way in WAYS:
        is_for_three = way.on_three or _IS_LONG
        marks = [pytest.mark.three_ranks] if is_for_three else []
        for dtype in way.dtypes:
            for is_global in (False, True):
                case = replace(way, dtype=dtype, is_global=is_global)
                yield pytest.param(case, id=case.title, marks=marks)


@pytest.mark.parametrize("case", cases())
def test_a_model_equals_one_process(equals_one_process, case):
    """Weights, state and logs, and the same bits on all ranks."""
    equals_one_process(case)


def test_each_way_has_a_name_of_its_own():
    """By which its result of one process is found."""
    assert len({way.title for way in WAYS}) == len(WAYS)


def test_the_loss_that_balances_experts_is_averaged_with_a_warning(folder):
    """It multiplies two means of the batch: here, of the rows of each rank."""
    with warned("differs from the gradient of the whole") as texts:
        run = Run(keras_dist.size(), False, True, folder, is_global=True)
        _, history = train_tokens(run, mixtral(0.5))
    assert len(texts) == (keras_dist.rank() == 0), texts
    assert np.isfinite(history.history["loss"]).all()
