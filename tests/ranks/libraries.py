"""Models of libraries train on all ranks as on one process.

Not a file that pytest finds by itself: `make libraries` names it, since it needs these
libraries.
"""

import pytest
from library_ways import WAYS

pytest_plugins = ["keras_ways.comparison"]


def cases():
    """Each way, with the batch of each rank and with that of all ranks."""
    for way in WAYS:
        for dtype in way.dtypes:
            for is_global in (False, True):
                batch = "global" if is_global else "rank"
                title = f'{way.title}, {dtype}, batch="{batch}"'
                yield pytest.param(way, dtype, is_global, id=title)


@pytest.mark.parametrize(("way", "dtype", "is_global"), cases())
def test_a_model_equals_one_process(equals_one_process, way, dtype, is_global):
    """Weights, state and logs, and the same bits on all ranks."""
    equals_one_process(way, dtype, is_global)
