"""Decide from the arguments of one call what this rank is going to do."""

from dataclasses import dataclass, replace
from typing import Any

import keras

from keras_dist import callbacks as ours
from keras_dist import comm, optimizer, plan
from keras_dist.data.adapters import DataAdapter
from keras_dist.data.division import ShardSpec
from keras_dist.data.feed import Feed, hold_out, training_feed, validation_feed
from keras_dist.data.source import Source
from keras_dist.data.steps import find_step_multiplier, scale_steps
from keras_dist.optimizer.rate import rate_factor
from keras_dist.setup.arguments import KerasArguments, Options
from keras_dist.setup.checks import check_averaging
from keras_dist.training import metrics
from keras_dist.version import __version__


@dataclass(frozen=True)
class FitSetup:
    """Every decision about one fit on this rank.

    Args:
        arguments: This rank's arguments for `keras.Model.fit`.
        callbacks: Ours and the user's, the same on every rank: also those that run on
            the first rank only.
        training: This rank's training data.
        validation: This rank's validation data, if there is any.
        averaging: How the gradients of each optimizer are averaged.
        factor: Full factor on the learning rate.
        step_multiplier: Schedules of the learning rate are read at step × this number.
        warmup_steps: Steps until the full factor is reached.
        plan: The same decisions in words, to be printed.
    """

    arguments: dict[str, Any]
    callbacks: list[Any]
    training: Feed
    validation: Feed | None
    averaging: list[optimizer.Averaging]
    factor: float
    step_multiplier: int
    warmup_steps: int
    plan: plan.Plan

    @property
    def feeds(self) -> list[Feed]:
        """The training data and, if there is any, the validation data."""
        return [feed for feed in (self.training, self.validation) if feed is not None]

    @property
    def saves_within_epochs(self) -> bool:
        """Return True if checkpoints are also saved in the middle of an epoch.

        Not for data of unknown length or order: it has no position to continue from.
        """
        return self.training.division is not None

    @property
    def resume_in_words(self) -> str:
        """Say in the plan where an interrupted epoch goes on, and why there."""
        division = self.training.division
        if division is not None:
            next_one = {"rows": "row", "batches": "batch"}[division.unit]
            return f"an interrupted epoch goes on at the next {next_one}"
        why = "its data has no known position"
        if self.training.arguments.get("steps_per_epoch"):
            why = "`steps_per_epoch` with batches"
        return f"an interrupted epoch begins again: {why}"

    def facts(self) -> dict[str, Any]:
        """Return name and value of everything that has to be equal on all ranks."""
        names = ("epochs", "initial_epoch", "validation_freq", "class_weight")
        given = self.arguments
        facts = {f"`{name}`": given[name] for name in names} | self.training.facts
        facts |= self.validation.facts if self.validation else {}
        # A callback of the user may be missing on some ranks: it has no collectives.
        callbacks = [
            type(callback).__name__
            for callback in self.callbacks
            if type(callback).__module__.split(".")[0] in ("keras", "keras_dist")
            and not ours.runs_on_first_rank_only(callback)
        ]
        return facts | {
            "whether there is validation data": self.validation is not None,
            "`op` and `compression`": [(a.op, a.compression) for a in self.averaging],
            "the learning rate's factor": self.factor,
            "the steps of the warm-up": self.warmup_steps,
            "the callbacks of Keras and keras_dist": callbacks,
        }


def prepare(
    model: Any, fit: KerasArguments, options: Options, spec: ShardSpec
) -> FitSetup:
    """Decide everything for this rank, without any collective.

    Args:
        model: The compiled model.
        fit: The arguments of `dist_fit` that `Model.fit` has too.
        options: All other arguments of `dist_fit`.
        spec: How data is divided among the ranks.

    Raises:
        ValueError: If an argument is unusable.
    """
    averaging = optimizer.averaging_of(model)
    check_averaging(averaging, options)
    world = comm.init()
    callbacks, options = _take_over_warmup(fit.callbacks, options)
    rule: Any = options.lr_scaling  # which is "auto" no more
    factor = rate_factor(rule, size=world.size)
    step_multiplier = find_step_multiplier(options.steps_scaling, size=world.size)
    training, validation = _make_feeds(fit, options, spec)
    if options.target_accuracy is not None and not fit.has_validation:
        raise ValueError(
            "`target_accuracy` is an accuracy on validation data. Received: "
            f"target_accuracy={options.target_accuracy} and no validation data. Pass "
            "`validation_data`, or StopAtAccuracy(target, monitor=…) in `callbacks`."
        )
    return FitSetup(
        arguments=_make_arguments(fit, training, validation, callbacks),
        callbacks=callbacks,
        training=training,
        validation=validation,
        averaging=averaging,
        factor=factor,
        step_multiplier=step_multiplier,
        warmup_steps=_count_warmup_steps(options.warmup_epochs, training.plan.steps),
        plan=plan.Plan(
            version=__version__,
            size=world.size,
            hosts=world.num_hosts,
            device=str(comm.device()),
            transport=comm.transport_name(),
            training=training.plan,
            validation=validation.plan if validation else None,
            rates=_describe_rates(model, options, factor, step_multiplier),
            is_compiled=bool(model.jit_compile),
            outputs=ours.destinations(callbacks),
            metrics=metrics.exceptions(model.metrics),
        ),
    )


def _take_over_warmup(given: Any, options: Options) -> tuple[list[Any], Options]:
    """Turn a `LearningRateWarmup` in the user's list into options.

    Returns:
        The callbacks without it, and the options: else the rate would be scaled twice.
    """
    callbacks = ours.order_callbacks(given, options.target_accuracy)
    others = [c for c in callbacks if not isinstance(c, ours.LearningRateWarmup)]
    for warmup in callbacks:
        if isinstance(warmup, ours.LearningRateWarmup):
            scaling, epochs = warmup.lr_scaling, warmup.warmup_epochs
            options = replace(options, lr_scaling=scaling, warmup_epochs=epochs)
    return others, options


def _make_arguments(
    fit: KerasArguments,
    training: Feed,
    validation: Feed | None,
    callbacks: list[Any],
) -> dict[str, Any]:
    """Make this rank's arguments for `Model.fit`: its data, callbacks and steps."""
    is_first = comm.rank() == 0
    arguments = fit.as_keywords() | training.arguments
    arguments["callbacks"] = ours.on_this_rank(callbacks)
    has_bar = any(isinstance(c, keras.callbacks.ProgbarLogger) for c in callbacks)
    if is_first and fit.verbose != 0 and not has_bar:
        throughput = next(c for c in callbacks if isinstance(c, ours.Throughput))
        arguments["callbacks"].append(ours.ProgressBar(throughput))
    if comm.size() == 1 and not training.has_epochs:
        # The user's data as it is: Keras decides what it accepts.
        changed = {
            "callbacks": arguments["callbacks"],
            "steps_per_epoch": training.arguments["steps_per_epoch"],
        }
        if fit.validation_steps and validation is not None:
            changed["validation_steps"] = validation.keras_steps
        return fit.as_keywords() | changed
    if training.has_epochs:
        arguments["callbacks"].append(ours.NextEpoch())
    arguments["verbose"] = fit.verbose if is_first else 0
    if validation is not None:
        pieces = (validation.arguments[n] for n in ("x", "y", "sample_weight"))
        arguments |= {
            "validation_split": 0.0,
            "validation_data": keras.utils.pack_x_y_sample_weight(*pieces),
            "validation_steps": validation.keras_steps,
            "validation_batch_size": validation.plan.batch_size,
        }
    return arguments


def _make_feeds(
    fit: KerasArguments, options: Options, spec: ShardSpec
) -> tuple[Feed, Feed | None]:
    # An unusable rule is an error even if there are no steps to apply it to.
    steps = scale_steps(options.steps_scaling, fit.steps_per_epoch, size=spec.size)
    scale_steps(
        options.validation_steps_scaling,
        fit.validation_steps,
        size=spec.size,
        name="validation_steps_scaling",
        multiples=True,
    )
    data, held_out = (fit.x, fit.y, fit.sample_weight), fit.validation_data
    try:
        if fit.validation_split and held_out is None:
            data, held_out = hold_out(*data, fit.validation_split)
        training = training_feed(
            *data,
            class_weight=fit.class_weight,
            batch_size=fit.batch_size,
            shuffle=fit.shuffle,
            steps_per_epoch=fit.steps_per_epoch,
            steps_rule=options.steps_scaling,
            spec=spec,
        )
        if held_out is None:
            return training, None
        return training, validation_feed(
            held_out,
            batch_size=fit.validation_batch_size or fit.batch_size,
            steps=fit.validation_steps,
            steps_rule=options.validation_steps_scaling,
            spec=spec,
        )
    except ValueError:
        if spec.size > 1 or isinstance(fit.x, Source):
            raise
        # One process: Keras raises its own error, if it rejects the data, too.
        kind = type(fit.x).__name__.lstrip("_")
        feed = Feed(
            {"steps_per_epoch": steps}, plan.Rows(kind), DataAdapter(fit.x, None)
        )
        return feed, None


def _count_warmup_steps(warmup_epochs: float, steps: int | None) -> int:
    if warmup_epochs < 0:
        raise ValueError(
            "`warmup_epochs` must not be negative. "
            f"Received: warmup_epochs={warmup_epochs}"
        )
    if warmup_epochs and steps is None:
        raise ValueError(
            "A warm-up in epochs needs the number of steps of an epoch, which is not "
            f"known. Received: warmup_epochs={warmup_epochs} and data of unknown "
            "length. Pass `steps_per_epoch`."
        )
    return round(warmup_epochs * (steps or 0))


def _describe_rates(
    model: Any, options: Options, factor: float, step_multiplier: int
) -> tuple[plan.Rate, ...]:
    """Describe the learning rate of each optimizer, before and after scaling."""
    rule: Any = options.lr_scaling
    if not isinstance(rule, str):
        rule = "your function" if callable(rule) else "your factor"
    times = f"× {plan.format_number(factor)}"

    def rate_of(leaf: Any) -> plan.Rate:
        schedule = optimizer.schedule_of(leaf)
        if schedule is None:
            now = float(keras.ops.convert_to_numpy(leaf.learning_rate))
            before, after = plan.format_number(now), plan.format_number(now * factor)
        else:
            before = type(schedule).__name__
            after = f"{before} {times}"
        return plan.Rate(
            before=before,
            after=after,
            rule=f"{rule}: {times}",
            factor=factor,
            warmup_epochs=options.warmup_epochs,
            step_multiplier=step_multiplier,
            is_schedule=schedule is not None,
        )

    optimizers = optimizer.optimizers_of(model)
    return tuple(
        rate_of(leaf) for each in optimizers for leaf in optimizer.leaves(each)
    )
