"""Describe the decisions for one fit in the words and numbers of the plan."""

from typing import Any

import keras

from keras_dist import optimizer
from keras_dist.data import Feed
from keras_dist.report import plan
from keras_dist.setup.options import Options


def rows_of(feed: Feed, rule: Any) -> plan.Rows:
    """The plan's lines about the rows and steps of a feed.

    Args:
        feed: This rank's training or validation data.
        rule: The rule that its number of steps was computed by.
    """
    rule_name = rule if isinstance(rule, (str, int, float)) else "your function"
    return plan.Rows(
        kind=feed.kind,
        batch_size=feed.batch_size,
        total=feed.num_rows,
        of_rank=feed.rank_rows,
        left_out=feed.left_out,
        leftover=feed.leftover,
        steps_before=feed.steps_before,
        steps=feed.steps,
        rule=f"steps scaled: {rule_name}" if feed.is_scaled else "",
    )


def rates_of(
    model: Any, options: Options, factor: float, step_multiplier: int
) -> tuple[plan.Rate, ...]:
    """The learning rate of each of the model's optimizers, before and after scaling.

    Args:
        model: The compiled model.
        options: The options of `dist_fit`.
        factor: The full factor on the learning rate.
        step_multiplier: Steps of one process for each step; schedules are read at
            step × `step_multiplier`.
    """
    rule = options.lr_scaling
    if not isinstance(rule, str):
        rule = "your function" if callable(rule) else "your factor"
    rates = []
    for leaf in (
        leaf
        for outermost in optimizer.optimizers_of(model)
        for leaf in optimizer.leaves(outermost)
    ):
        schedule = optimizer.schedule_of(leaf)
        if schedule is None:
            now = float(keras.ops.convert_to_numpy(leaf.learning_rate))
            before, after = plan.format_number(now), plan.format_number(now * factor)
        else:
            before = type(schedule).__name__
            after = f"{before} × {plan.format_number(factor)}"
        rates.append(
            plan.Rate(
                before=before,
                after=after,
                rule=f"{rule}: × {plan.format_number(factor)}",
                factor=factor,
                warmup_epochs=options.warmup_epochs,
                step_multiplier=step_multiplier,
                is_schedule=schedule is not None,
            )
        )
    return tuple(rates)
