"""Decide from the arguments of one call what this rank is going to do."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, plan, private
from keras_dist.callbacks.callback_order import on_this_rank, order_callbacks
from keras_dist.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_dist.callbacks.user_callbacks import (
    is_writer,
    reads_batch_logs,
    runs_on_first_rank_only,
)
from keras_dist.data.adapters import hold_out, training_feed, validation_feed
from keras_dist.data.division import ReadContext
from keras_dist.data.feed import Feed
from keras_dist.optimizer.attach import averaging_of
from keras_dist.optimizer.nested import leaves_of
from keras_dist.optimizer.rate import count_warmup_steps, rate_factor, schedule_of
from keras_dist.optimizer.reduce import Averaging
from keras_dist.setup.arguments import Options
from keras_dist.training import batch_norm
from keras_dist.training.remember import list_variables
from keras_dist.training.session import FitDecisions


@dataclass(frozen=True)
class FitSetup:
    """Every decision about one fit on this rank.

    Args:
        arguments: This rank's arguments for `keras.Model.fit`.
        callbacks: Ours and the user's, the same on every rank: also those that run on
            the first rank only.
        decided: This rank's data, and how it trains.
        averaging: How the gradients of each optimizer are averaged.
        plan: The same decisions in words: lines with a label and a text.
    """

    arguments: dict[str, Any]
    callbacks: list[Any]
    decided: FitDecisions
    averaging: list[Averaging]
    plan: list[tuple[str, str]]

    def facts(self) -> dict[str, Any]:
        """Return name and value of everything that has to be equal on all ranks."""
        names = ("epochs", "initial_epoch", "validation_freq")
        facts = {f"`{name}`": self.arguments[name] for name in names}
        facts |= self.decided.feed.facts
        validation = self.decided.validation
        facts |= validation.facts if validation else {}
        # A callback of the user may be missing on some ranks: it has no collectives.
        callbacks = [
            type(callback).__name__
            for callback in self.callbacks
            if type(callback).__module__.split(".")[0] in ("keras", "keras_dist")
            and not runs_on_first_rank_only(callback)
        ]
        return facts | {
            "whether there is validation data": validation is not None,
            "`op` and `compression`": [(a.op, a.compression) for a in self.averaging],
            "the learning rate's factor": self.decided.factor,
            "the steps of the warm-up": self.decided.warmup_steps,
            "the callbacks of Keras and keras_dist": callbacks,
        }


def check_model(model: Any, *, is_compiled: bool = True) -> None:
    """Raise an error if `model` cannot be used on many ranks.

    Args:
        model: What the user passed as the model.
        is_compiled: Whether it must be compiled.

    Raises:
        TypeError: If it is not a Keras model.
        ValueError: If it is not compiled, or uses a `tf.distribute` strategy.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    if is_compiled and not model.compiled:
        raise ValueError(
            "The model must be compiled: its optimizer averages the gradients. "
            f"Received: the uncompiled model {model.name!r}. Call model.compile(…) "
            "first."
        )
    strategy = _find_strategy(model)
    if strategy is not None:
        raise ValueError(
            "The model is already distributed by TensorFlow. Received: a model under "
            f"{type(strategy).__name__}. Create and compile it "
            "outside of `strategy.scope()`: keras_dist starts one process per device "
            "instead."
        )


def _find_strategy(model: Any) -> Any:
    """Find the `tf.distribute.Strategy` around this call or of anything in `model`.

    The scope may have been around the compilation alone, or around a layer.
    """
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    if model.distribute_strategy is not tf.distribute.get_strategy():
        return model.distribute_strategy
    for variable in list_variables(model):
        value = getattr(variable, "value", None)
        if isinstance(value, tf.distribute.DistributedValues):
            return value.distribute_strategy
    return None


def prepare(
    model: Any, arguments: dict[str, Any], options: Options, context: ReadContext
) -> FitSetup:
    """Decide everything for this rank, without any collective.

    Args:
        model: The compiled model.
        arguments: Every argument of `Model.fit`.
        options: All other arguments of `dist_fit`.
        context: How data is divided among the ranks.

    Raises:
        ValueError: If an argument is unusable.
    """
    averaging = averaging_of(model)
    if options.batch == "global" and any(each.op != "average" for each in averaging):
        raise ValueError(
            "All ranks share each batch, as one process would train, and a sum of "
            "gradients depends on the number of ranks. Received: an optimizer made by "
            'DistributedOptimizer(…, op="sum"), and batch="global", as `distribute()` '
            "passes it. Leave one out."
        )
    world = comm.init()
    stateful = [e.name for e in private.layers_of(model) if getattr(e, "stateful", 0)]
    if options.batch == "global" and world.size > 1 and stateful:
        raise ValueError(
            "A stateful layer keeps a state for each row of the batch, and each of "
            f"{world.size} ranks has some of the rows. Received: layers with "
            f"stateful=True: {stateful}. Train on one process (keras-dist run -np 1), "
            'or call `keras_dist.dist_fit(model, …, batch="rank", shuffle=False)` with '
            "a `batch_shape` of one rank's rows."
        )
    callbacks, options, steps = _take_over_warmup(arguments["callbacks"], options)
    is_kept = any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks)
    if is_kept and options.resume is not None:
        raise ValueError(
            "`resume` and BackupAndRestore would both restore the model. Received: "
            f"resume={os.fspath(options.resume)!r} and a BackupAndRestore in "
            "`callbacks`. Leave the callback out."
        )
    rule: Any = options.lr_scaling  # which is "auto" no more
    factor = rate_factor(rule, size=world.size)
    # A schedule is a function of the step, and has its value at the same epoch.
    step_multiplier = world.size if options.steps_scaling == "divide" else 1
    context = replace(context, steps_per_execution=model.steps_per_execution)
    training, validation = _make_feeds(arguments, options, context)
    steps = steps or training.plan.steps
    is_given = arguments["validation_data"] is not None or arguments["validation_split"]
    if options.target_accuracy is not None and not is_given:
        raise ValueError(
            "`target_accuracy` is an accuracy on validation data. Received: "
            f"target_accuracy={options.target_accuracy} and no validation data. Pass "
            "`validation_data`, or StopAtAccuracy(target, monitor=…) in `callbacks`."
        )
    return FitSetup(
        arguments=_make_arguments(arguments, training, validation, callbacks),
        callbacks=callbacks,
        decided=FitDecisions(
            feed=training,
            validation=validation,
            factor=factor,
            warmup_steps=count_warmup_steps(options.warmup_epochs, steps),
            step_multiplier=step_multiplier,
            attaches=world.size > 1,
            batch_norm=options.batch_norm,
            is_verbose=arguments["verbose"] != 0,
        ),
        averaging=averaging,
        plan=[
            *_describe_ranks(),
            *plan.describe_data(
                training.plan, validation.plan if validation else None, world.size
            ),
            *dict.fromkeys(_describe_rates(model, options, factor, step_multiplier)),
            *_describe_resume(options, training),
            *_describe_parts(model, callbacks, options),
        ],
    )


def _describe_ranks() -> Iterator[tuple[str, str]]:
    world, device = comm.init(), comm.device()
    if world.size == 1:
        yield "ranks", f"1 (serial), {device}"
        return
    hosts = "1 host" if world.num_hosts == 1 else f"{world.num_hosts} hosts"
    yield "ranks", f"{world.size} on {hosts}, {device}"
    yield "transport", comm.transport_name()


def _describe_parts(
    model: Any, callbacks: list[Any], options: Options
) -> Iterator[tuple[str, str]]:
    """Say in the plan what is another on several ranks."""
    if comm.size() == 1:
        return
    rows = batch_norm.describe_rows(model, options.batch_norm)
    if rows:
        yield "batch normalization", rows
    if model.jit_compile:
        is_off = batch_norm.GLOBAL in rows
        parts = "forward and backward, then update; averaging between"
        yield "XLA", f"off: {batch_norm.EXCHANGE}" if is_off else parts
    if names := [type(e).__name__ for e in callbacks if reads_batch_logs(e)]:
        yield "batch logs", f"of all ranks, for {', '.join(names)}"
    if names := [type(each).__name__ for each in callbacks if is_writer(each)]:
        yield "first rank", f"runs {', '.join(names)}"


def _describe_resume(options: Options, training: Feed) -> Iterator[tuple[str, str]]:
    """Say in the plan where an interrupted epoch continues, and why there."""
    if options.resume is None:
        return
    why = "its data has no known position"
    if training.arguments.get("steps_per_epoch"):
        why = "`steps_per_epoch` with batches"
    text = f"starts again: {why}"
    if training.division is not None:
        unit = "row" if training.division.unit == "rows" else "batch"
        text = f"continues at the next {unit}"
    yield "resume", f"an interrupted epoch {text}"


def _take_over_warmup(
    callbacks: Any, options: Options
) -> tuple[list[Any], Options, Any]:
    """Turn a `LearningRateWarmup` in the user's list into options.

    Returns:
        The callbacks without it, else the rate would be scaled twice; the options; and
        its steps of an epoch.
    """
    steps, callbacks = None, order_callbacks(callbacks, options.target_accuracy)
    others = [c for c in callbacks if not isinstance(c, LearningRateWarmup)]
    for warmup in callbacks:
        if isinstance(warmup, LearningRateWarmup):
            scaling, epochs = warmup.lr_scaling, warmup.warmup_epochs
            steps = warmup.steps_per_epoch
            options = replace(options, lr_scaling=scaling, warmup_epochs=epochs)
    return others, options, steps


def _make_arguments(
    arguments: dict[str, Any],
    training: Feed,
    validation: Feed | None,
    callbacks: list[Any],
) -> dict[str, Any]:
    """Make this rank's arguments for `Model.fit`: its data, callbacks and steps."""
    local = arguments | training.arguments
    local["callbacks"] = on_this_rank(callbacks)
    if comm.size() == 1 and training.epoch is None:
        # The user's data as it is: Keras decides what it accepts.
        return arguments | {"callbacks": local["callbacks"]}
    local["verbose"] = arguments["verbose"] if comm.rank() == 0 else 0
    if validation is not None:
        pieces = (validation.arguments[n] for n in ("x", "y", "sample_weight"))
        local |= {
            "validation_split": 0.0,
            "validation_data": keras.utils.pack_x_y_sample_weight(*pieces),
            "validation_steps": validation.keras_steps,
            "validation_batch_size": validation.plan.batch_size,
        }
    return local


def _make_feeds(
    arguments: dict[str, Any], options: Options, context: ReadContext
) -> tuple[Feed, Feed | None]:
    held_out = arguments["validation_data"]
    try:
        if arguments["validation_split"] and held_out is None:
            arguments, held_out = hold_out(arguments, context)
        training = training_feed(
            arguments,
            steps_rule=options.steps_scaling,
            context=replace(context, first_epoch=arguments["initial_epoch"]),
        )
        if held_out is None:
            return training, None
        return training, validation_feed(
            held_out,
            batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
            steps=arguments["validation_steps"],
            steps_rule=options.validation_steps_scaling,
            context=context,
            prefix="validation_",
        )
    except ValueError:
        if context.size > 1 or context.position is not None:
            raise
        # One process: Keras raises its own error, if it rejects the data, too.
        kind = type(arguments["x"]).__name__.lstrip("_")
        return Feed(data=arguments["x"], plan=plan.Rows(kind)), None


def _describe_rates(
    model: Any, options: Options, factor: float, step_multiplier: int
) -> Iterator[tuple[str, str]]:
    """Describe the learning rate of each optimizer, before and after scaling."""
    rule: Any = options.lr_scaling
    if not isinstance(rule, str):
        rule = "your function" if callable(rule) else "your factor"
    times, warmup = f"× {factor:.6g}", ""
    if options.warmup_epochs:
        plural = "" if options.warmup_epochs == 1 else "s"
        warmup = f", after {options.warmup_epochs:.6g} epoch{plural} of warm-up"

    for leaf in leaves_of(model):
        schedule = schedule_of(leaf)
        if schedule is None:
            now = float(comm.to_array(leaf.learning_rate))
            before, after = f"{now:.6g}", f"{now * factor:.6g}"
        else:
            before = type(schedule).__name__
            after = f"{before} {times}"
        change = f"{before} → {after} ({rule}: {times}{warmup})"
        yield "learning rate", before if factor == 1 else change
        if schedule is not None and step_multiplier > 1:
            yield "learning rate", f"schedule read at step × {step_multiplier}"
