"""Scale the learning rate, with a warm-up."""

from dataclasses import replace

from keras_dist import comm
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks
from keras_dist.optimizer.rate import LearningRateRule, count_warmup_steps, rate_factor
from keras_dist.training.session import session_of


class LearningRateWarmup(FitCallback):
    """Switches on a factor on the learning rate of updates, which rises from 1.

    The factor rises batch by batch to its full value over `warmup_epochs`, and stays
    there (Goyal et al., 2017, https://arxiv.org/abs/1706.02677). It depends on
    `optimizer.iterations`, so it continues after a restored checkpoint. The optimizer's
    `learning_rate` remains the rate for one process: other callbacks read and set it
    without the factor, and saved files contain it without the factor.

    Args:
        warmup_epochs: Epochs until the full factor; 0 for the full factor at once.
        lr_scaling: The full factor: `"linear"` (the number of ranks), `"sqrt"`,
            `"none"`, a positive number, or a function of the number of ranks.
        steps_per_epoch: Steps of an epoch on each rank, for data of unknown length.

    Raises:
        ValueError: If `warmup_epochs` is negative, `lr_scaling` is not valid, or the
            number of steps of an epoch is not known.

    Example:

    ```python
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(x, y, callbacks=[keras_dist.LearningRateWarmup(5)])
    ```
    """

    def __init__(
        self,
        warmup_epochs: float,
        *,
        lr_scaling: LearningRateRule = "linear",
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        count_warmup_steps(warmup_epochs, 0)  # raise now, not when a fit begins
        self.warmup_epochs = warmup_epochs
        self.lr_scaling = lr_scaling
        self.steps_per_epoch = steps_per_epoch

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.use(warmup=self)

    def set_rates(self) -> None:
        """Set the factor: a training begins."""
        steps = self.steps_per_epoch or self.params.get("steps")
        warmup_steps = count_warmup_steps(self.warmup_epochs, steps)
        full = rate_factor(self.lr_scaling, size=comm.size())
        session = session_of(self.model)
        session.decided = replace(
            session.decided, factor=full, warmup_steps=warmup_steps
        )
