"""All ranks take part in a trial; the search itself is the first rank's."""

import keras
import pytest
from claims import raises_everywhere

import keras_dist
from keras_dist.callbacks import is_calling_callbacks

pytestmark = pytest.mark.three_ranks


class Pruned(Exception):
    """As `optuna.TrialPruned`."""


class StandIn:
    """A study that calls an objective, and a trial of it, as Optuna does."""

    def __init__(self):
        self.number = -1
        self.found = []
        self.reported = []

    def optimize(self, objective, n_trials, timeout, catch=()):
        for self.number in range(n_trials):
            try:
                self.found.append(objective(self))
            except Pruned:
                self.found.append("pruned")
            except catch as error:
                self.found.append(str(error))

    def suggest_int(self, name, low, high):
        return min(max(self.number, low), high)

    def report(self, value, step):
        self.reported.append((self.number, step))

    def should_prune(self):
        return self.number in (1, 2)


class Prunes(keras.callbacks.Callback):
    """Asks at the end of each epoch, on all ranks or on the first one."""

    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        assert is_calling_callbacks() or keras_dist.size() == 1  # plain Keras
        self.trial.report(logs["loss"], epoch)
        if self.trial.should_prune():
            raise Pruned


@pytest.fixture
def objective(rows, make_model):
    """Prunes in all three ways, and fails on one rank before, in and after a fit."""
    x, y = (array[:96] for array in rows)

    def objective(trial):
        number = trial.suggest_int("number", 0, 9)
        assert trial.params == {"number": number} and trial.number == number
        is_last = keras_dist.rank() == keras_dist.size() - 1
        callbacks = {
            1: [Prunes(trial)],
            2: [keras_dist.first_rank_only(Prunes(trial))],
            4: [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: 1 / is_last)],
        }
        if number == 3 and is_last:
            raise KeyError("three")
        if number == 5 and not is_last:
            raise ValueError("five")
        history = keras_dist.dist_fit(
            make_model(), x, y, verbose=0, callbacks=callbacks.get(number)
        )
        if number == 6 and keras_dist.rank() == 0:
            raise TypeError("six")
        return history.history["loss"][0]

    return objective


def test_a_trial_ends_on_all_ranks(world, objective):
    """It is pruned, has failed, or has the value of all; then the next one begins."""
    study = StandIn() if world.rank == 0 else None
    options = {"n_trials": 8, "catch": (Exception,)}
    keras_dist.tune.optimize(study, objective, **options)
    if world.rank == 0:
        on = "On rank {}: ".format
        value = study.found[0]
        three = "'three'" if world.size == 1 else on(world.size - 1) + "KeyError: "
        assert study.found[1:3] == (["pruned"] * 2)
        assert study.found[3].startswith(three)
        assert study.found[6:] == ["six", value]
        assert study.reported == [(1, 0), (2, 0)]
        if world.size > 1:
            assert study.found[4:6] == ["division by zero", "five"]
    assert keras_dist.gather(study is None) == [False] + [True] * (world.size - 1)


@pytest.mark.slow_on_three
def test_an_error_of_the_search_ends_it_on_all_ranks(world, objective):
    """As without `catch`; and what the first rank lacks is an error, too."""
    study = StandIn() if world.rank == 0 else None
    for message in raises_everywhere(
        Exception, lambda: keras_dist.tune.optimize(study, objective, n_trials=8)
    ):
        assert "three" in message
    for message in raises_everywhere(
        ValueError, lambda: keras_dist.tune.optimize(None, objective, n_trials=8)
    ):
        assert "The first rank needs the study" in message
    for message in raises_everywhere(
        ValueError, lambda: keras_dist.tune.search(None, objective)
    ):
        assert "The first rank needs the tuner" in message
