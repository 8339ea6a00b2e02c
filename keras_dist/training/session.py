"""The state of a model that trains on many ranks, during one fit."""

from dataclasses import dataclass
from typing import Any

from keras_dist import comm, optimizer
from keras_dist.training.counts import RowsSeen, RowsTrained, TrainingData
from keras_dist.training.first_step import FirstStep
from keras_dist.training.loss_kind import EagerLog
from keras_dist.training.metric_scope import MetricScope
from keras_dist.training.stray_variables import StrayVariables
from keras_dist.training.traced import TracedFunctions


class Instruments:
    """The stopwatch and the NaN guard of each train step, if they are in use."""

    def __init__(self) -> None:
        self.stopwatch: optimizer.Stopwatch | None = None
        self.guard: optimizer.Guard | None = None

    def time_steps(self) -> None:
        """Time the parts of each step from now on."""
        self.stopwatch = self.stopwatch or optimizer.Stopwatch()

    def watch(self, guard: optimizer.Guard | None) -> None:
        """Check gradients by `guard` before they are applied; `None`: do not."""
        self.guard = guard


class XlaChoice:
    """Whether steps run in two functions compiled by XLA, with an allreduce between."""

    def __init__(self) -> None:
        self._is_split = False

    @property
    def is_split(self) -> bool:
        """Whether the next step runs in two compiled functions."""
        return self._is_split

    def choose(self, is_split: bool) -> None:
        """Set whether steps are split, when Keras makes its train function."""
        self._is_split = is_split

    def give_up(self) -> None:
        """Train without XLA, which cannot compile this model's step."""
        self._is_split = False


class EpochRates:
    """The learning rates of an epoch's last updates.

    They are read before callbacks such as `ReduceLROnPlateau` set those of the next
    epoch.
    """

    def __init__(self) -> None:
        self._of_epoch: dict[str, float] | None = None

    @property
    def of_epoch(self) -> dict[str, float]:
        """The rates by a name for the logs; empty before the first epoch's end."""
        return self._of_epoch or {}

    def keep(self) -> None:
        """Read the rates at the end of each epoch from now on."""
        self._of_epoch = self.of_epoch

    def end_epoch(self, model: Any) -> None:
        """Read the rates of the epoch that has just been trained, if they are kept."""
        if self._of_epoch is not None:
            self._of_epoch = optimizer.effective_rates(model)


class SaveStamp:
    """Epoch and batch of the training, which are written into files of weights."""

    def __init__(self) -> None:
        self._epoch_and_batch: tuple[int, int] | None = None

    @property
    def value(self) -> tuple[int, int] | None:
        """The number of completed epochs, and the last batch; `None` if not counted."""
        return self._epoch_and_batch

    def set(self, epoch: int, batch: int) -> None:
        """Set the number of completed epochs, and the last batch."""
        self._epoch_and_batch = epoch, batch

    def clear(self) -> None:
        """Write nothing into files of weights from now on."""
        self._epoch_and_batch = None


class Holder:
    """Whether `dist_fit` ends the session, or the first callback that ends.

    If `dist_fit` does, the session lasts until all callbacks have ended: they may save
    and evaluate at the end of the training.
    """

    def __init__(self) -> None:
        self._is_held = False

    @property
    def is_held(self) -> bool:
        """Whether `dist_fit` ends the session."""
        return self._is_held

    def hold(self) -> None:
        """Leave it to `dist_fit` to end the session."""
        self._is_held = True


@dataclass(frozen=True)
class Session:
    """The state of a model that trains on many ranks, during one fit.

    Each part changes its state only by its own methods.

    Args:
        traced: Functions that Keras has traced.
        rows_seen: Batches and rows that the metrics have seen.
        rows_trained: Rows that this rank has trained on in this epoch.
        training_data: The training data, and the number of the next step.
        first_step: Builds the model, then calls hooks.
        stop_request: This rank's stop request, and whether all ranks have agreed.
        metrics: Whether a metric's result is one over all ranks.
        instruments: The stopwatch and the NaN guard of each step.
        xla: Whether steps run in two functions compiled by XLA.
        eager_log: Which losses of a step that runs eagerly are sums over rows.
        stray: Variables that a step changes and the model does not keep.
        rates: The learning rates of the epoch.
        stamp: Epoch and batch for files of weights.
        holder: Whether `dist_fit` ends the session.
    """

    traced: TracedFunctions
    rows_seen: RowsSeen
    rows_trained: RowsTrained
    training_data: TrainingData
    first_step: FirstStep
    stop_request: optimizer.StopRequest
    metrics: MetricScope
    instruments: Instruments
    xla: XlaChoice
    eager_log: EagerLog
    stray: StrayVariables
    rates: EpochRates
    stamp: SaveStamp
    holder: Holder

    @property
    def is_plain(self) -> bool:
        """Whether the model's own train step is used unchanged."""
        return comm.size() == 1 and self.instruments.guard is None


def begin(model: Any, last: Session | None) -> Session:
    """Make a session for `model`, which is a plain Keras model now.

    Args:
        model: A `keras.Model`.
        last: The session of its last fit, if there was one.
    """
    traced = TracedFunctions(model, None if last is None else last.traced)
    # A reused test function counts in the variable with which it was traced.
    rows_seen = last.rows_seen if last is not None and traced.is_reused else RowsSeen()
    return Session(
        traced=traced,
        rows_seen=rows_seen,
        rows_trained=RowsTrained(),
        training_data=TrainingData(),
        first_step=FirstStep(),
        stop_request=optimizer.StopRequest(),
        metrics=MetricScope(),
        instruments=Instruments(),
        xla=XlaChoice(),
        eager_log=EagerLog(),
        stray=StrayVariables(),
        rates=EpochRates(),
        stamp=SaveStamp(),
        holder=Holder(),
    )


def session_of(model: Any) -> Session:
    """The session of a model that trains on many ranks (`step.install`)."""
    return model._distributed_session
