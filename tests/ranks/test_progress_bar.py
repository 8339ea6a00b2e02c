"""Keras's progress bar shows what all ranks do, and leaves logs as they are."""

import re
import sys
import time

import keras
import pytest
from claims import KERAS, assert_equal_to_the_bit

import keras_dist
from keras_dist.callbacks import progress_bar

_COPY = "keras_dist.callbacks.broadcast_variables"

pytestmark = pytest.mark.two_ranks


@pytest.fixture
def shown(monkeypatch, capsys):
    """A function that returns what was printed since it was called last."""
    monkeypatch.setattr(progress_bar, "_INTERVAL", 0.0)
    monkeypatch.setattr(keras.utils.Progbar, "__init__", _eager(keras.utils.Progbar))
    return lambda: re.sub(r"\x1b\[\d+m|[\b]", "", capsys.readouterr().out)


def _eager(bar):
    """Its constructor, for a bar that is drawn at each update."""
    own = bar.__init__

    def init(self, *args, **kwargs):
        own(self, *args, **{**kwargs, "interval": 0})

    return init


class _Waits(keras.callbacks.Callback):
    """Makes a step last so long that it is known how many rows a second has."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)


def test_the_bar_shows_rows_per_second_of_all_ranks(world, rows, make_model, shown):
    """At each step; on the first rank; and the history is that of a silent fit."""
    x, y = (array[:96] for array in rows)
    histories, measured, printed = [], [], []
    for verbose in (1, 2, 0):
        history = keras_dist.dist_fit(
            make_model(),
            x,
            y,
            batch_size=8,
            epochs=2,
            callbacks=[_Waits()],
            validation_data=(x, y),
            verbose=verbose,
        )
        measured.append(history.history.pop("rows_per_second"))
        histories.append(history.history)
        printed.append(shown())
    assert histories[0] == histories[1] == histories[2]
    assert world.rank == 0 or printed == ["", "", ""]
    assert printed[2] == ""
    if world.rank == 0:
        found = re.findall(r"(\d)/6 [^\r\n]* rows_per_second: ([\d.]+)", printed[0])
        steps = [int(step) for step, _ in found]
        assert steps == [1, 2, 3, 4, 5, 6, 6] * 2
        # A step has 16 rows, and lasts 50 ms or more.
        rates = [float(rate) for _, rate in found]
        assert all(0 < rate <= 16 / 0.05 for rate in rates)
        if KERAS >= (3, 11):  # the bar of 3.10 ends with the mean over the steps
            assert rates[6::7] == pytest.approx(measured[0], rel=1e-4)
        # Of the last step, which is before the end of the epoch.
        for rate, mean in zip(rates[5::7], measured[0], strict=True):
            assert rate >= mean * (1 - 1e-4)
        assert len(re.findall(r"^6/6 - ", printed[1], re.MULTILINE)) == 2


def test_long_evaluations_and_copies_have_bars(
    world, rows, make_model, shown, monkeypatch
):
    """On the first rank; from the second evaluation on with the number of steps."""
    monkeypatch.setattr(progress_bar, "_LONG", 0.0)
    monkeypatch.setattr(sys.modules[_COPY], "_LARGE", 0)
    monkeypatch.setattr(sys.modules[_COPY], "_PIECE", 0)
    x, y = (array[:32] for array in rows)
    given = {"batch_size": 8, "epochs": 2, "validation_data": (x, y)}
    for verbose in (1, 2, 0):
        model = make_model(seed=world.rank)
        keras_dist.dist_fit(model, x, y, verbose=verbose, **given)
        assert_equal_to_the_bit(model)
        printed = shown()
        if world.rank == 0 and verbose == 1:
            first, second = printed.split("evaluation")[1:]
            assert "2/Unknown" in first and re.search(r"\b2/2 ━+ .*s/step\s", second)
            assert "copying the model to all ranks" in printed
            assert "ms/MiB" in printed or "us/MiB" in printed or "s/MiB" in printed
        elif world.rank or verbose == 0:
            assert printed == ""
        else:
            assert "evaluation" not in printed and "copying" not in printed
