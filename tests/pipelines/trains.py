"""Train with the data of a library, be ended in an epoch, and resume.

    python tests/pipelines/trains.py FOLDER KIND

On two ranks: not interrupted; interrupted in the second epoch; resumed. On three: the
same interrupted training is resumed. Which rows were read is written to FOLDER.
"""

import json
import shutil
import sys
from pathlib import Path

import kinds
import numpy as np

import keras_dist

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from resumable import train, values_of


class Ended(BaseException):
    """Ends a fit at once."""


def end():
    """End a fit."""
    raise Ended


def main(folder, kind):
    """Train, and compare on two ranks."""
    options = {"as_data": getattr(kinds, kind), "verbose": 2, "is_equivalent": True}

    def trained(name, **more):
        """The state, the history, and the rows of this rank by update."""
        rows = {}
        try:
            result = train(str(folder / name), saw=rows.__setitem__, **options, **more)
        except Ended:
            result = None, None
        everyone = keras_dist.gather(rows)
        if keras_dist.rank() == 0:
            path = folder / f"{name}.{keras_dist.size()}.{'end' * bool(more)}.json"
            path.write_text(json.dumps(everyone))
        return (*result, rows)

    if keras_dist.size() == 2:
        expected, history, rows_expected = trained("whole")
        steps = len(rows_expected) // 3
        _, _, rows = trained("cut", save_steps=1, dies=steps + 4, die=end)
        if keras_dist.rank() == 0:
            shutil.copytree(folder / "cut", folder / "three")
        keras_dist.gather("copied")
        state, resumed, rows_after = trained("cut")
        assert min(rows_after) == steps + 3
        assert rows | rows_after == rows_expected
        assert all((a == b).all() for a, b in zip(state, expected, strict=True))
        assert values_of(resumed) == values_of(history)
    else:
        state, _, _ = trained("three")
        assert np.isfinite(state[0]).all()
    print("trained", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
