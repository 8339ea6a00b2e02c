"""`shares=`: ranks compute different numbers of rows of each global batch."""

import json
import re
import time

import keras
import numpy as np
import pytest
from claims import raises_everywhere, shortened
from test_global_batch import (
    KINDS,
    assert_equal,
    compiled,
    data_of,
    exact,  # noqa: F401 - a fixture
    folder,  # noqa: F401 - a fixture
    rows_of,
    trained,
)

import keras_dist
from keras_dist.callbacks import added
from keras_dist.training.session import session_of

pytestmark = [pytest.mark.several_ranks, pytest.mark.three_ranks]


def uneven(size):
    """The first rank computes most of a batch."""
    return [5, *range(1, size)]


class Spy(keras.callbacks.Callback):
    """Notes this rank's rows of each step."""

    def __init__(self):
        super().__init__()
        self.rows, self.before = [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.before = 0

    def on_train_batch_end(self, batch, logs=None):
        so_far = session_of(self.model).rows_trained.total()
        self.rows.append(so_far - self.before)
        self.before = so_far


class Sleeps(keras.callbacks.Callback):
    """The first rank sleeps before each step, as long as four steps on this machine."""

    def __init__(self):
        super().__init__()
        self.began, self.seconds = None, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        if keras_dist.rank() == 0:
            time.sleep(min(max(0.1, 4 * self.seconds), 1.0))
        self.began = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds = time.monotonic() - self.began


@pytest.fixture
def often(monkeypatch):
    """Speeds are compared after every second step."""
    monkeypatch.setattr(added, "_STEPS", 2)
    monkeypatch.setattr(added, "_SECONDS", 0)
    monkeypatch.setattr(added, "_COMPILED_SELDOM", 1)


@pytest.fixture
def slow_first_rank(often, monkeypatch):
    """The first rank computes four times as long as any other, whatever the load is."""
    take = added.ComputingTimes.take

    def taken(times):
        return float(take(times) > 0) * (1.0 if keras_dist.rank() == 0 else 0.25)

    monkeypatch.setattr(added.ComputingTimes, "take", taken)


@pytest.mark.parametrize("kind", shortened(KINDS, {"arrays", "generator"}))
@pytest.mark.parametrize("shares", ["given", "measured"])
def test_any_shares_give_the_model_of_one_process(world, slow_first_rank, kind, shares):
    """Of all kinds of data; the last batch has fewer rows than there are ranks."""
    asked = uneven(world.size) if shares == "given" else "measured"
    options = {"shares": asked}
    given = data_of(kind, 41, 10) | {"shuffle": False, "epochs": 3}
    spy = Spy()
    ours = trained(given, is_ours=True, options=options, callbacks=[spy])
    given = data_of(kind, 41, 10) | {"shuffle": False, "epochs": 3}
    assert_equal(ours, trained(given, is_ours=False))
    everyone = np.array(keras_dist.gather(spy.rows))
    full = everyone[:, everyone.sum(axis=0) == 10]
    assert set(everyone.sum(axis=0)) == {1, 10} and full.min() >= 1
    if shares == "given":
        expected = 10 * np.array(asked) / sum(asked)
        assert (abs(full.T - expected) < 1).all()
    else:
        assert full[0].min() < 10 // world.size, "the slow rank has fewer rows"


@pytest.mark.parametrize(
    ("options", "microbatch"),
    [
        ({}, None),
        pytest.param({"jit_compile": True}, None, marks=pytest.mark.long),
        pytest.param({}, 3, marks=pytest.mark.long),
    ],
)
def test_shares_move_in_a_graph(slow_first_rank, options, microbatch):
    """With weights of classes, several steps in one call, XLA, and in pieces."""
    options = {"run_eagerly": False, "steps_per_execution": 2} | options
    given = data_of("arrays", 320, 64) | {"shuffle": False, "epochs": 4}
    given["class_weight"] = {0: 0.3, 1: 2.0}
    spy = Spy()
    ours = trained(
        given,
        is_ours=True,
        model=compiled(**options),
        options={"shares": "measured", "microbatch": microbatch},
        callbacks=[spy],
    )
    assert_equal(ours, trained(given, is_ours=False, model=compiled()))
    # An epoch of 5 steps is three calls, of 2, 2 and 1.
    full = [rows for call, rows in enumerate(spy.rows) if call % 3 < 2]
    assert any(keras_dist.gather(len(set(full)) > 1)), full


def test_a_training_that_is_resumed_has_the_shares_of_before(
    slow_first_rank,
    folder,  # noqa: F811
):
    """On as many ranks; and it is that of one process."""
    given = data_of("arrays", 41, 10) | {"shuffle": False}
    options = {"shares": "measured", "resume": f"{folder}/shares"}
    first, second = Spy(), Spy()
    added._STEPS = 4  # the last of 10 steps, then, has the shares that are saved
    trained(given, is_ours=True, options=options, callbacks=[first], epochs=2)
    added._STEPS = 1000  # no more changes
    ours = trained(given, is_ours=True, options=options, callbacks=[second], epochs=4)
    # The checkpoint has the notes of the first spy, too.
    assert second.rows[:10] == first.rows
    assert second.rows[10:14] == [first.rows[-2]] * 4
    if keras_dist.rank() == 0:
        assert first.rows[-2] < 10 // keras_dist.size()
    assert_equal(ours, trained(given, is_ours=False, epochs=4))


def test_plan_line_and_report_say_what_each_rank_computes(
    world, often, capsys, tmp_path
):
    """Before the first step, and when shares have moved, by what the clock says."""
    x, y = rows_of(40, 0)
    report = tmp_path / "run.json"
    for shares in (uneven(world.size), "measured"):
        options = {"batch": "global", "shares": shares, "report": report}
        given = {"batch_size": 10, "epochs": 3, "verbose": 2, "callbacks": [Sleeps()]}
        keras_dist.dist_fit(compiled(), x, y, **given, **options)
        shown = capsys.readouterr().out
        if world.rank == 0 and shares == "measured":
            assert "rows at first, then by speed" in shown
            # When they move depends on the clock.
            found = re.search(r"epoch (\d): shares of a batch moved", shown)
            first = json.loads(report.read_text())["shares"][0]
            assert found and first["epoch"] == int(found[1])
            assert first["step"] > 0 and sum(first["rows"]) == 10
        elif world.rank == 0:
            assert {2: "10 global: 8 + 2 rows", 3: "10 global: 6 + 2 + 2 rows"}[
                world.size
            ] in shown


def test_shares_that_cannot_be_are_an_error_before_the_first_step(world):
    """On all ranks."""
    x, y = rows_of(12, 0)

    def fit(**options):
        keras_dist.dist_fit(compiled(), x, y, batch_size=6, verbose=0, **options)

    for options, text in (
        ({"batch": "global", "shares": "fast"}, "`shares` must be"),
        ({"batch": "global", "shares": [1]}, f"shares=[1] and {world.size} ranks"),
        ({"batch": "global", "shares": [1, 0, 1][: world.size]}, "positive number"),
        ({"shares": "measured"}, 'Pass batch="global"'),
        ({"batch": "global", "shares": "measured", "shard": "none"}, "already split"),
    ):
        [message, *_] = raises_everywhere(ValueError, lambda o=options: fit(**o))
        assert text in message
