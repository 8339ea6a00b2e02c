"""From the arguments of one call to what this rank is going to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_dist import callbacks as ours
from keras_dist import comm, optimizer, plan, scaling, sharding
from keras_dist.version import __version__

# Ours that change logs or state come before the user's callbacks, which read them;
# ours that act on what the others did come after.
_FIRST = (
    ours.AverageStatistics,
    ours.MetricAverage,
    ours.Throughput,
    ours.TrainingTime,
)
_LAST = (ours.StopAtAccuracy, ours.StopTogether, ours.BroadcastVariables)


@dataclass(frozen=True)
class Options:
    """The arguments of `dist_fit` that `Model.fit` does not have."""

    lr_scaling: scaling.LearningRateRule = "linear"
    warmup_epochs: float = 0
    steps_scaling: scaling.StepsRule = "divide"
    validation_steps_scaling: scaling.StepsRule = "divide"
    shard: str = "auto"
    target_accuracy: float | None = None


@dataclass(frozen=True)
class Job:
    """What one rank does in one fit.

    Args:
        arguments: Of `keras.Model.fit`, for this rank.
        training: This rank's training data.
        validation: This rank's validation data, if there is any.
        factor: Full factor on the learning rate.
        stretch: A schedule is read at step × this.
        warmup_steps: Steps until the full factor.
        has_own_warmup: Whether the user's list has a `LearningRateWarmup`, which
            then scales the rate.
        plan: All of it, to be read.
    """

    arguments: dict[str, Any]
    training: sharding.Feed
    validation: sharding.Feed | None
    factor: float
    stretch: int
    warmup_steps: int
    has_own_warmup: bool
    plan: plan.Plan

    def facts(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""
        facts = dict(self.training.facts)
        facts |= self.validation.facts if self.validation else {}
        names = ("epochs", "initial_epoch", "validation_freq", "class_weight")
        facts |= {f"`{name}`": self.arguments[name] for name in names}
        facts["whether there is validation data"] = self.validation is not None
        facts["the learning rate's factor"] = self.factor
        facts["the steps of the warm-up"] = self.warmup_steps
        facts["the callbacks"] = [
            type(callback).__name__
            for callback in self.arguments["callbacks"]
            if not ours.is_writer(callback)
        ]
        return facts


def check_model(model: Any) -> None:
    """Raise where `model` cannot be trained on many ranks.

    Raises:
        TypeError: If it is not a Keras model.
        ValueError: If it is not compiled, or under a `tf.distribute` strategy.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    if not model.compiled:
        raise ValueError(
            "The model must be compiled, so that its optimizer can be made to average. "
            f"Received: the uncompiled model {model.name!r}. Call model.compile(…) first."
        )
    if tf.distribute.has_strategy() or not _has_default_strategy(model):
        raise ValueError(
            "The model is already distributed by TensorFlow. Received: a model under "
            f"{type(model.distribute_strategy).__name__}. Make and compile it outside "
            "of `strategy.scope()`: keras_dist starts one process per device instead."
        )


def prepare(model: Any, fit: dict[str, Any], options: Options, *, seed: int) -> Job:
    """Decide everything for this rank; local work, no collective.

    Args:
        model: The compiled model.
        fit: All arguments of `Model.fit` but the model.
        options: Those of `dist_fit`.
        seed: Of the order of the rows, the same on all ranks.

    Raises:
        ValueError: If an argument is unusable.
    """
    check_model(model)
    world = comm.init()
    factor = scaling.rate_factor(options.lr_scaling, size=world.size)
    split = sharding.Split(world.rank, world.size, options.shard, seed)
    training, validation = _feeds(fit, options, split)
    callbacks = arrange(fit["callbacks"], options)
    has_own_warmup = any(isinstance(c, ours.LearningRateWarmup) for c in callbacks)
    if options.target_accuracy is not None and validation is None:
        raise ValueError(
            "`target_accuracy` is an accuracy on validation data. Received: "
            f"target_accuracy={options.target_accuracy} and no validation data. Pass "
            "`validation_data`, or StopAtAccuracy(target, monitor=…) in `callbacks`."
        )
    verbose = fit["verbose"]
    arguments = (
        fit
        | training.arguments
        | {
            "callbacks": [
                c for c in callbacks if world.is_first or not ours.is_writer(c)
            ],
            "verbose": verbose if world.is_first else 0,
            "validation_split": 0.0,
            "validation_data": None,
        }
    )
    if validation is not None:
        given = validation.arguments
        arguments |= {
            "validation_data": _packed(given),
            "validation_steps": validation.steps if fit["validation_steps"] else None,
            "validation_batch_size": validation.batch_size,
        }
    stretch = scaling.stretch(options.steps_scaling, size=world.size)
    return Job(
        arguments=arguments,
        training=training,
        validation=validation,
        factor=factor,
        stretch=stretch,
        warmup_steps=_warmup_steps(options.warmup_epochs, training.steps),
        has_own_warmup=has_own_warmup,
        plan=plan.Plan(
            version=__version__,
            size=world.size,
            hosts=-(-world.size // world.local_size),
            device=str(comm.device()),
            transport=comm.transport_name(),
            training=_rows(training, options.steps_scaling, fit["steps_per_epoch"]),
            validation=validation
            and _rows(
                validation, options.validation_steps_scaling, fit["validation_steps"]
            ),
            rates=_rates(model, options, factor, stretch, has_own_warmup),
            epochs=fit["epochs"],
            is_compiled=bool(model.jit_compile),
            writers=tuple(
                (type(c).__name__, ours.destination(c))
                for c in callbacks
                if ours.is_writer(c)
            ),
        ),
    )


def arrange(given: Any, options: Options | None = None) -> list[Any]:
    """The user's callbacks with ours around them, none of ours twice.

    Args:
        given: What the user passed as `callbacks`.
        options: Of the fit.
    """
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    users = keras.tree.flatten(given) if given else []
    size = comm.size()
    added: list[type] = [ours.Throughput]
    if size > 1:
        added += [
            ours.AverageStatistics,
            ours.MetricAverage,
            ours.StopTogether,
            ours.BroadcastVariables,
        ]
    every = [*users, *(cls() for cls in added if not _has(users, cls))]
    if options is not None and options.target_accuracy is not None:
        every.append(ours.StopAtAccuracy(options.target_accuracy))
    first = [c for cls in _FIRST for c in every if isinstance(c, cls)]
    last = [c for cls in _LAST for c in every if isinstance(c, cls)]
    return [
        *first,
        *(c for c in every if not isinstance(c, _FIRST + _LAST)),
        *last,
    ]


def _feeds(
    fit: dict[str, Any], options: Options, split: sharding.Split
) -> tuple[sharding.Feed, sharding.Feed | None]:
    training_data = fit["x"], fit["y"], fit["sample_weight"]
    validation_data = fit["validation_data"]
    if fit["validation_split"] and validation_data is None:
        training_data, validation_data = sharding.hold_out(
            *training_data, fit["validation_split"]
        )
    training = sharding.training_feed(
        *training_data,
        batch_size=fit["batch_size"],
        shuffle=fit["shuffle"],
        steps_per_epoch=fit["steps_per_epoch"],
        steps_rule=options.steps_scaling,
        split=split,
    )
    validation = None
    if validation_data is not None:
        validation = sharding.validation_feed(
            validation_data,
            batch_size=fit["validation_batch_size"] or training.batch_size,
            steps=fit["validation_steps"],
            steps_rule=options.validation_steps_scaling,
            split=split,
        )
    else:  # a wrong rule is an error also where it is not used yet
        scaling.scaled_steps(
            options.validation_steps_scaling,
            None,
            size=split.size,
            name="validation_steps_scaling",
            multiples=True,
        )
    return training, validation


def _has(callbacks: Sequence[Any], cls: type) -> bool:
    return any(isinstance(callback, cls) for callback in callbacks)


def _has_default_strategy(model: Any) -> bool:
    return model.distribute_strategy is tf.distribute.get_strategy()


def _packed(given: dict[str, Any]) -> Any:
    if given["y"] is None and given["sample_weight"] is None:
        return given["x"]
    parts = given["x"], given["y"], given["sample_weight"]
    return parts if parts[2] is not None else parts[:2]


def _warmup_steps(warmup_epochs: float, steps: int | None) -> int:
    if warmup_epochs < 0:
        raise ValueError(
            "`warmup_epochs` must not be negative. "
            f"Received: warmup_epochs={warmup_epochs}"
        )
    if warmup_epochs and steps is None:
        raise ValueError(
            "The number of steps of an epoch is not known, so the warm-up cannot tell "
            f"how long it is. Received: warmup_epochs={warmup_epochs} and data of "
            "unknown length. Pass `steps_per_epoch`."
        )
    return round(warmup_epochs * (steps or 0))


def _rows(feed: sharding.Feed, rule: Any, given_steps: int | None) -> plan.Rows:
    named = rule if isinstance(rule, (str, int, float)) else "your function"
    return plan.Rows(
        kind=feed.kind,
        batch_size=feed.batch_size,
        total=feed.num_rows,
        of_rank=feed.rank_rows,
        left_out=feed.left_out,
        steps_before=feed.steps_before,
        steps=feed.steps,
        rule=f"steps scaled: {named}" if given_steps else "",
    )


def _rates(
    model: Any, options: Options, factor: float, stretch: int, has_own_warmup: bool
) -> tuple[plan.Rate, ...]:
    rates = []
    for found in optimizer.optimizers_of(model):
        schedule = optimizer.schedule_of(found)
        if schedule is None:
            now = float(keras.ops.convert_to_numpy(found.learning_rate))
            before, after = plan.format_number(now), plan.format_number(now * factor)
        else:
            before = type(schedule).__name__
            after = f"{before} × {plan.format_number(factor)}"
        rule = options.lr_scaling
        if not isinstance(rule, str):
            rule = "your function" if callable(rule) else "your factor"
        rates.append(
            plan.Rate(
                before=before,
                after=after if not has_own_warmup else "as LearningRateWarmup says",
                rule=f"{rule}: × {plan.format_number(factor)}",
                factor=factor,
                warmup_epochs=options.warmup_epochs,
                stretch=stretch,
                is_schedule=schedule is not None,
            )
        )
    return tuple(rates)
