"""Reuse functions that Keras has traced, as long as they are valid."""

from typing import Any


class TracedFunctions:
    """Keeps the test function of a distributed model from one fit to the next.

    The train function is traced again in each fit: one that was traced before does not
    average gradients. The test function is valid until the model is compiled again.

    Args:
        model: A `keras.Model`, plain at this time.
        last: The traced functions of the fit before, if there was one.
    """

    def __init__(self, model: Any, last: "TracedFunctions | None") -> None:
        self._compiled = _compiled(model)
        self._plain_test_function = model.test_function
        is_valid = last is not None and _is_same(last._compiled, self._compiled)
        self._test_function: Any = None
        if last is not None and is_valid:
            self._test_function = last._test_function
        self.is_reused = is_valid

    def enter(self, model: Any) -> None:
        """Give a model that becomes distributed the test function of the last fit."""
        model.train_function = None
        model.test_function = self._test_function

    def leave(self, model: Any) -> None:
        """Keep the test function, and give the plain model back its own."""
        model.train_function = None
        self._test_function = model.test_function
        is_same = _is_same(self._compiled, _compiled(model))
        model.test_function = self._plain_test_function if is_same else None


def _compiled(model: Any) -> tuple[Any, ...]:
    """The objects that `compile` makes, and options that make Keras trace again."""
    made = [getattr(model, n, None) for n in ("_compile_loss", "_compile_metrics")]
    return *made, model.run_eagerly, model.jit_compile, model.steps_per_execution


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    is_known = any(found is not None for found in now[:2])
    pairs = zip(before, now, strict=True)
    return is_known and all(old is new or old == new for old, new in pairs)
