"""Save checkpoints while a model trains, in a thread, and when a signal asks for it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from types import FrameType
from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import build_optimizers, state_variables
from keras_dist.checkpoint import states
from keras_dist.checkpoint.saved import Resume, Saved, on_first_rank
from keras_dist.checkpoint.states import CallbackStates
from keras_dist.data import draws
from keras_dist.data.batch_rows import batch_of
from keras_dist.data.division import DataPosition
from keras_dist.data.source import Source
from keras_dist.launch.monitor.rank_process import record_path
from keras_dist.lines import say, warn
from keras_dist.optimizer.nested import leaves_of
from keras_dist.optimizer.rate import rate_progress, restore_rate_progress
from keras_dist.optimizer.step_context import Request
from keras_dist.setup.fit_setup import FitSetup
from keras_dist.training import build, losses
from keras_dist.training.remember import preserve_variables
from keras_dist.training.session import session_of
from keras_dist.training.step import own_train_step

# The exit code of a process that was asked to end and has saved: EX_TEMPFAIL of
# sysexits.h, "try again".
EXIT_CODE = 75

# If no checkpoint could be written: EX_IOERR. Trying again would save nothing, either.
NOT_SAVED_CODE = 74


class EndSignals:
    """The signals by which a cluster asks this process to save and end.

    So does Ctrl-C of `keras-dist run`, which gives this rank the time.

    Attributes:
        number: Of the first one that was received; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}  # the handlers of others

    def begin(self) -> None:
        """From now on, note these signals instead of ending."""
        if threading.current_thread() is threading.main_thread():
            # SLURM sends the second one.
            is_slurm = "SLURM_JOB_ID" in os.environ
            numbers = [signal.SIGTERM, *[signal.SIGUSR1] * is_slurm]
            is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            numbers += [signal.SIGINT] * (record_path is not None and is_default)
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)

    def finish(self, *, is_leaving: bool) -> None:
        """Restore the handlers; ignore the signals if they end this process."""
        for number, before in self._before.items():
            after = signal.SIG_IGN if is_leaving else before
            signal.signal(number, signal.SIG_DFL if after is None else after)
        self._before.clear()
        if self.number and not is_leaving:
            signal.raise_signal(self.number)  # an error has ended the fit

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


class SavedExit(SystemExit):
    """The end of a rank that was asked to end; the same command continues.

    `keras-dist run` knows it by its name.
    """


class SavedInterrupt(KeyboardInterrupt):
    """The same by Ctrl-C, for which a script may have a handler."""


class Saver(keras.callbacks.Callback):
    """Saves in the middle and at the end of epochs, and restores before the first step.

    Must be the last callback, behind `History`, whose state it saves.

    Args:
        resume: The folder of the checkpoints, and the one to resume from.
        setup: The arguments and data of this rank.
        callbacks: The callbacks whose state is saved.
    """

    def __init__(self, resume: Resume, setup: FitSetup, callbacks: list[Any]) -> None:
        super().__init__()
        self._resume, self._setup, self._feed = resume, setup, setup.decided.feed
        self._states = CallbackStates(callbacks)
        # Only data with a position to continue from is saved in the middle of an epoch.
        self._saves_within_epochs = setup.decided.feed.division is not None
        seconds = resume.options.save_seconds if self._saves_within_epochs else None
        self._seconds, self._saved_at = seconds, 0.0
        self._signals, self._is_leaving = EndSignals(), False
        self._thread = futures.ThreadPoolExecutor(1)
        self._write: futures.Future[str] | None = None
        self._failure: BaseException | None = None  # of the last write
        self._epoch = self._done = 0
        self._random: Any = None
        self._rates: list[Any] = []

    def close(self) -> None:
        """Write what is left, and restore the handlers of signals."""
        try:
            self._signals.finish(is_leaving=self._is_leaving)
        finally:
            self.end_write()
            self._thread.shutdown()

    def end_write(self) -> None:
        """Wait until the last checkpoint is written; warn if it could not be."""
        write, self._write = self._write, None
        if write is None:
            return
        self._failure = write.exception()
        if self._failure is not None:
            warn(
                "A checkpoint could not be written; the checkpoints before it are "
                f"still there. Received: {self._failure}"
            )

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        session_of(model).hooks.use(saver=self)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        saved = self._resume.saved
        self._signals.begin()
        self._saved_at = time.monotonic()
        self._states.begin()
        if saved is None:
            return
        self._restore_callbacks(saved)
        if not saved.position.step:
            # Before `on_epoch_begin` of callbacks, which may change what it restores.
            self._restore_model(saved)
            self._restore_random(saved)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._done = epoch, 0
        saved = self._resume.saved
        if saved and saved.position.step and saved.position.epoch == epoch:
            # The callbacks have begun this epoch once before: undo what they did now.
            self._restore_callbacks(saved)
            self._rates = states.set_rates(self.model, saved.rates)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if not session_of(self.model).has_started and self._random is None:
            # Building the model draws random numbers, which the uninterrupted training
            # drew before its first epoch. So the states from before are restored later.
            self._random = states.random_state()
        requests, found = session_of(self.model).traced.requests, self._find_request()
        if requests.asked not in (Request.STOP, found):
            requests.ask(found)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        before, self._done = self._done, batch + 1
        division = self._feed.division
        request = session_of(self.model).traced.requests.take()
        if comm.size() == 1:
            request = self._find_request()
        if division and self._done >= division.count_steps(self._epoch):
            return  # the end of the epoch saves
        every = self._resume.options.save_steps
        is_due = every is not None and self._done // every > before // every
        if self._saves_within_epochs and (is_due or request):
            self._save(self._position(self._done))
        if request == Request.END:
            self.end_if_requested(in_epoch=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._save(self._position(None), is_finished=bool(self.model.stop_training))
        self.end_if_requested()

    def _find_request(self) -> Request:
        """Return what this rank requests. Only the first rank reads the clock."""
        if self._signals.number:
            return Request.END
        if self._seconds is None or comm.rank() > 0:
            return Request.NOTHING
        is_due = time.monotonic() - self._saved_at >= self._seconds
        return Request.SAVE if is_due else Request.NOTHING

    def _position(self, done: int | None) -> DataPosition:
        """Return the position after `done` steps of this epoch; `None`: after it."""
        epoch, division = self._epoch, self._feed.division
        if division is None:
            return DataPosition(epoch + 1, 0, 0)
        return division.position(epoch, done or division.count_steps(epoch))

    def _save(self, position: DataPosition, *, is_finished: bool = False) -> None:
        """Gather the state of all ranks, and let the first one write a checkpoint."""
        callbacks = self._states.collect()
        ranks = states.gather_ranks(self.model, callbacks)
        self._saved_at = time.monotonic()
        if comm.rank() != 0:
            return
        self.end_write()
        saved = Saved(
            position=position,
            seed=self._resume.context.seed,
            keras_seed=self._resume.context.keras_seed,
            data=self._feed.position_facts(),
            is_finished=is_finished,
            rates=list(map(rate_progress, leaves_of(self.model))),
            warmup_steps=self._setup.decided.warmup_steps,
            callbacks=callbacks,
            ranks=ranks,
            model=states.describe_model(self.model),
            arrays=list(map(comm.to_array, state_variables(self.model))),
        )
        self._write = self._thread.submit(self._resume.folder.write, saved.tree())

    def end_if_requested(self, *, in_epoch: bool = False) -> None:
        """End this process if a signal of some rank requests it; all ranks call this.

        Args:
            in_epoch: Whether the epoch goes on. A stop ends it before.
        """
        is_stop = session_of(self.model).traced.requests.asked == Request.STOP
        by_rank = comm.gather((self._signals.number, in_epoch and is_stop))
        number, is_stop = map(max, zip(*by_rank, strict=True))
        if is_stop or not number:
            return
        self.end_write()
        # No rank ends before, since its end ends the others.
        is_written = not any(comm.gather(self._failure is not None))
        if comm.rank() == 0:
            where, folder = f"epoch {self._epoch + 1}", self._resume.folder
            again = f"resumes from {folder.path}"
            if in_epoch and not self._saves_within_epochs:
                again = f"begins {where} again"
            if not is_written:
                last = folder.number and folder.file(folder.number)
                again = f"resumes from {last or 'the beginning'}"
                where += f", and its checkpoint could not be written ({self._failure})"
            name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
            say(f"keras_dist: received {name} in {where}; the same command {again}")
        self._is_leaving = True
        if not is_written:
            raise SystemExit(NOT_SAVED_CODE)
        raise SavedInterrupt if number == signal.SIGINT else SavedExit(EXIT_CODE)

    def _own(self, saved: Saved) -> Any:
        """Return this rank's saved state; on another size the first rank's."""
        is_same_size = len(saved.ranks) == comm.size()
        return saved.ranks[comm.rank() if is_same_size else 0]

    def _restore_random(self, saved: Saved) -> None:
        noise = session_of(self.model).traced.noise
        states.restore_random(self._own(saved)["random"], noise)
        if len(saved.ranks) != comm.size():
            draws.renew_rank_numbers(comm.rank())  # they are the first rank's

    def restore_shared(self) -> None:
        """Restore what is broadcast after it; an error is raised on all ranks."""
        saved = self._resume.saved
        with on_first_rank(self._resume.folder.path) as is_first:
            if is_first and saved is not None:
                states.check_fits(self.model, saved.model)
                variables = state_variables(self.model)
                # A callback may have set the rates.
                with preserve_variables(self._rates):
                    for variable, value in zip(variables, saved.arrays, strict=True):
                        variable.assign(value)
                    if len(saved.ranks) != comm.size():
                        found = self._states.find(saved.callbacks, AverageStatistics)
                        starts = [] if found is None else found["before"]
                        states.merge_ranks(self.model, saved.ranks, starts)
                saved.arrays.clear()

    def restore_own(self) -> None:
        """Restore the state of this rank that differs from the first rank's, and rates.

        These were scaled for the current size before.
        """
        saved = self._resume.saved
        if saved is None:
            return
        if len(saved.ranks) == comm.size():
            variables = state_variables(self.model)
            for index, value in saved.ranks[comm.rank()]["variables"].items():
                variables[int(index)].assign(value)
        if saved.position.step:
            states.restore_metrics(self.model, saved.ranks)
            self._restore_random(saved)
        elif self._random is not None:
            states.restore_random(self._random, session_of(self.model).traced.noise)
        before, now = saved.warmup_steps, self._setup.decided.warmup_steps
        for leaf, progress in zip(leaves_of(self.model), saved.rates, strict=True):
            restore_rate_progress(leaf, progress, now / before if before else 1)

    def _restore_callbacks(self, saved: Saved) -> None:
        # This rank's own state of a callback, else the first rank's.
        self._states.restore(saved.callbacks | self._own(saved)["callbacks"])

    def _restore_model(self, saved: Saved) -> None:
        """Restore the model before its first step, if it can be built now.

        Else the first step builds and restores it, but for its learning rates.
        """
        model, session = self.model, session_of(self.model)
        spec = batch_of(getattr(self._feed.data, "element_spec", None))
        if losses.is_keras_method(model, "train_step"):
            build.build_early(model, spec)
        if all(comm.gather(states.describe_model(model) == saved.model)):
            session.traced.use_trial(session.traced.trial)  # the first step counts rows
            build.start(model)
        elif saved.is_finished or saved.position.epoch >= self.params["epochs"]:
            self._restore_unstarted()
        else:
            self._rates = states.set_rates(model, saved.rates)

    def _restore_unstarted(self) -> None:
        """Restore the model at once, because no epoch is left and so no first step."""
        model, session, feed = self.model, session_of(self.model), self._feed
        if feed.division is not None:
            batch, _ = session.split_data(Source(feed.data).first(1)[0])
            own_step, is_eager = own_train_step(model), model.run_eagerly
            return build.start(model, batch, own_step, is_eager=is_eager)
        if not model.built:
            raise ValueError(
                "The training is finished, and there is no data to build the model "
                "from before it is restored. Received: a model that is not built. "
                "Build it before, for example with an `Input` as its first layer."
            )
        build_optimizers(model)
        return build.start(model)


@contextlib.contextmanager
def saving(resume: Resume | None, setup: FitSetup) -> Iterator[dict[str, Any]]:
    """Context manager for a fit that starts where its checkpoint ends, and saves.

    Args:
        resume: The folder of the checkpoints, and the one to resume from; `None` to
            save nothing.
        setup: The arguments and data of this rank.

    Yields:
        The arguments to pass to `Model.fit`.
    """
    if resume is None:
        yield setup.arguments
        return
    arguments, saved = dict(setup.arguments), resume.saved
    if saved is not None:
        arguments["initial_epoch"] = _first_epoch(saved, setup)
        if comm.rank() == 0 and arguments["verbose"] != 0:
            division, rows = setup.decided.feed.division, ""
            if saved.position.step and division is not None:
                begin, total, unit = division.begin, division.total, division.unit
                rows = f", after {begin:,} of {total:,} {unit}"
            epoch, path = saved.position.epoch + 1, resume.folder.path
            say(f"resumed in epoch {epoch}{rows}, from {path}")
        for callback in setup.callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
    added = []
    if not any(isinstance(c, keras.callbacks.History) for c in setup.callbacks):
        # Keras would add it behind our own callback, which saves its state.
        added.append(keras.callbacks.History())
    saver = Saver(resume, setup, setup.callbacks + added)
    try:
        yield arguments | {"callbacks": [*arguments["callbacks"], *added, saver]}
        saver.end_write()  # before the fit returns on any rank: they may read it
        saver.end_if_requested()
    finally:
        saver.close()


def _first_epoch(saved: Saved, setup: FitSetup) -> int:
    """Epoch in which to resume; `epochs` if the training had finished."""
    if saved.is_finished:
        return int(setup.arguments["epochs"])
    division, epoch = setup.decided.feed.division, saved.position.epoch
    if saved.position.step and epoch >= setup.arguments["epochs"]:
        raise ValueError(
            f"The checkpoint is of the middle of epoch {epoch + 1}. Received: "
            f"epochs={setup.arguments['epochs']}. Pass at least {epoch + 1}, or an "
            "empty folder."
        )
    if saved.position.step and division is None:
        raise ValueError(
            "The training cannot be resumed in the middle of an epoch with this data. "
            f"Received: {setup.decided.feed.plan.kind}, and a checkpoint of the middle "
            "of an epoch. Pass the same data as before, or an empty folder."
        )
    return epoch if division is None else division.epoch
