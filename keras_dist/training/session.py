"""What a model that trains on many ranks remembers during one fit."""

from dataclasses import dataclass
from typing import Any

from keras_dist import comm, optimizer
from keras_dist.training.counts import RowsSeen, RowsTrained, TrainingData
from keras_dist.training.first_step import FirstStep
from keras_dist.training.metric_scope import MetricScope
from keras_dist.training.traced import TracedFunctions


class Instruments:
    """What looks at each train step, where somebody wants it."""

    def __init__(self) -> None:
        self.stopwatch: optimizer.Stopwatch | None = None
        self.guard: optimizer.Guard | None = None

    def time_steps(self) -> None:
        """Time the parts of each step from now on."""
        self.stopwatch = self.stopwatch or optimizer.Stopwatch()

    def watch(self, guard: optimizer.Guard | None) -> None:
        """Let `guard` look at gradients before they are applied; `None`: nobody."""
        self.guard = guard


class XlaChoice:
    """Whether train steps are compiled by XLA, in two parts with averaging between."""

    def __init__(self) -> None:
        self._is_split = False

    @property
    def is_split(self) -> bool:
        """Whether the next step is run in two compiled parts."""
        return self._is_split

    def choose(self, is_split: bool) -> None:
        """As Keras was asked to, when it makes its train function."""
        self._is_split = is_split

    def give_up(self) -> None:
        """XLA cannot compile this model's step: go on without."""
        self._is_split = False


class SaveStamp:
    """How far the training has come, for files of weights that are written now."""

    def __init__(self) -> None:
        self._epoch_and_batch: tuple[int, int] | None = None

    @property
    def value(self) -> tuple[int, int] | None:
        """Epochs that are done and the last batch; `None` where nobody counts."""
        return self._epoch_and_batch

    def set(self, epoch: int, batch: int) -> None:
        """So far the training has come."""
        self._epoch_and_batch = epoch, batch

    def clear(self) -> None:
        """Nothing is stamped any more."""
        self._epoch_and_batch = None


class Holder:
    """Who ends the session: `dist_fit`, or the first callback that ends.

    Where `dist_fit` does, other callbacks still save and evaluate with it at the end of
    the training.
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
    """What a model that trains on many ranks remembers during one fit.

    Each part has its own state, which changes by its methods alone.

    Args:
        traced: Functions that Keras has traced.
        rows_seen: What the metrics have been shown.
        rows_trained: What this rank has trained on in this epoch.
        training: Which step comes next, and what is known of its data.
        first_step: What happens once, when the model is built.
        stop_request: Of this rank, and whether all ranks have agreed on it.
        metrics: Whether a result is one over all ranks.
        instruments: What looks at each step.
        xla: Whether steps are compiled by XLA.
        stamp: What is written into files of weights.
        holder: Who ends the session.
    """

    traced: TracedFunctions
    rows_seen: RowsSeen
    rows_trained: RowsTrained
    training: TrainingData
    first_step: FirstStep
    stop_request: optimizer.StopRequest
    metrics: MetricScope
    instruments: Instruments
    xla: XlaChoice
    stamp: SaveStamp
    holder: Holder

    @property
    def is_plain(self) -> bool:
        """Whether a step is the model's own and nothing else."""
        return comm.size() == 1 and self.instruments.guard is None


def begin(model: Any, last: Session | None) -> Session:
    """A session of `model`, which is plain now.

    Args:
        model: A `keras.Model`.
        last: Its session before, if it had one.
    """
    traced = TracedFunctions(model, None if last is None else last.traced)
    # The test function that is kept counts in the variable that it was traced with.
    rows_seen = last.rows_seen if last is not None and traced.is_reused else RowsSeen()
    return Session(
        traced=traced,
        rows_seen=rows_seen,
        rows_trained=RowsTrained(),
        training=TrainingData(),
        first_step=FirstStep(),
        stop_request=optimizer.StopRequest(),
        metrics=MetricScope(),
        instruments=Instruments(),
        xla=XlaChoice(),
        stamp=SaveStamp(),
        holder=Holder(),
    )


def session_of(model: Any) -> Session:
    """The session of a model that trains on many ranks (`step.install`)."""
    return model._distributed_session
