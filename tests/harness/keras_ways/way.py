"""A way to train: how Keras runs it on one process, and `dist_fit` on all ranks."""

import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist
from harness.claims import EXACT, difference_of_states, models_in

# Rows of one rank in a step. 22 rows make whole and smaller last steps on 1, 2 and 3
# ranks, and leave no row out: 4 * 5 + 2, 8 * 2 + 6, 12 + 10.
BATCH_SIZE = 4
ROWS = 22

# That of bfloat16, of eight bits, is a few roundings of a number.
TOLERANCES = {"float64": EXACT, "float32": 1e-5, "bfloat16": 2.0**-5}


@dataclass(frozen=True)
class Run:
    """One training of a way, which sees no difference between its two kinds.

    Args:
        size: Ranks whose batches are one global batch.
        is_oracle: Whether Keras trains on one process, with the global batch.
        is_traced: Whether models train in a graph, as by default; else eagerly, which
            is quicker for few steps.
        folder: For files; the same on all ranks that train one model.
        is_global: Whether the ranks share the batches, by `batch="global"`: both kinds
            are the same script.
    """

    size: int
    is_oracle: bool
    is_traced: bool
    folder: Path
    is_global: bool = False

    @property
    def batch_size(self) -> int:
        """Rows of a batch of the data that `fit` is given."""
        if self.is_global:
            return BATCH_SIZE * self.size - 1  # which does not divide evenly
        return BATCH_SIZE * self.size if self.is_oracle else BATCH_SIZE

    def steps(self, count: int) -> int:
        """`steps_per_epoch` of a script for one process, for so many global batches."""
        return count if self.is_oracle or self.is_global else count * self.size

    def batches(self, *arrays: Any) -> Any:
        """A data set of one array, or of rows of several, in batches."""
        rows = arrays[0] if len(arrays) == 1 else arrays
        return tf.data.Dataset.from_tensor_slices(rows).batch(self.batch_size)

    def compile(self, model: Any, *args: Any, **arguments: Any) -> Any:
        """`model.compile`; returns the model."""
        how = {"run_eagerly": not self.is_traced, "jit_compile": False}
        model.compile(*args, **how | arguments)
        return model

    def fit(self, model: Any, x: Any, y: Any = None, **arguments: Any) -> Any:
        """`fit` of Keras or of all ranks, in the order of the rows; its `History`.

        Arrays are read in batches of `batch_size`; other data has them by itself.
        """
        common: dict[str, Any] = {"shuffle": False, "verbose": 0}
        if isinstance(x, (np.ndarray, dict, list)):
            common["batch_size"] = self.batch_size
        if self.is_oracle or self.is_global:
            arguments.pop("lr_scaling", None)
        if self.is_oracle:
            return model.fit(x, y, **common | arguments)
        options = {"batch": "global"} if self.is_global else {"lr_scaling": "none"}
        return keras_dist.dist_fit(model, x, y, **options | common | arguments)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        part: The topic.
        name: Name of the way, in words.
        train: Trains, and returns models, optimizers, histories and arrays, in any
            nesting: all of them are compared.
        is_traced: As of `Run`.
        dtypes: In which `make libraries` runs it; `make equivalence` takes float64.
        on_three: Whether `make libraries` runs it on three ranks, too.
        rounds_as: A coarser dtype, if some of it is computed in that in all models.
        dtype: Of the models.
        is_global: As of `Run`.
    """

    part: str
    name: str
    train: Callable[[Run], Any]
    is_traced: bool = False
    dtypes: tuple[str, ...] = ("float64",)
    on_three: bool = False
    rounds_as: str | None = None
    dtype: str = "float64"
    is_global: bool = False

    @property
    def tolerance(self) -> float:
        """The largest relative difference that is rounding."""
        return TOLERANCES[self.rounds_as or self.dtype]

    @property
    def title(self) -> str:
        """Part, name and how it is run, which no other way has."""
        batch = "global" if self.is_global else "rank"
        return f'{self.part}: {self.name}, {self.dtype}, batch="{batch}"'

    def oracle(self) -> dict[str, Any] | str:
        """What one process leaves, as arrays by name; or an error, as text.

        The other ranks must not wait for the one that has it.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                return self._train(folder, is_oracle=True)
            except Exception:
                return traceback.format_exc()

    def compare(self, expected: dict[str, Any] | str) -> tuple[float, float, str]:
        """Train on all ranks, which must hold the same bits.

        Returns:
            The largest relative difference from `oracle()`, the tolerance, and the name
            of the array that has it.
        """
        with tempfile.TemporaryDirectory() as own:
            arrays = self._train(keras_dist.broadcast(own), is_oracle=False)
            bits = {name: array.tobytes() for name, array in arrays.items()}
            everyone = keras_dist.gather(bits)  # all ranks have read its files
        # An optimizer has counted updates.
        states = [array for name, array in arrays.items() if "state" in name]
        is_whole = any(array.max(initial=0) >= 1 for array in states)
        assert is_whole, f"not all of its training is compared: {list(arrays)}"
        assert isinstance(expected, dict), f"one process failed: {expected}"
        apart = sorted(arrays.keys() ^ expected.keys())
        assert not apart, f"on one process or on the ranks alone: {apart}"
        differences = [
            (difference_of_states([arrays[name]], [expected[name]]), name)
            for name in arrays
        ]
        assert all(np.isfinite(found) for found, _ in differences), "not finite"
        assert everyone.count(everyone[0]) == len(everyone)
        largest, name = max(differences)
        return largest, self.tolerance, name

    def _train(self, folder: str, *, is_oracle: bool) -> dict[str, Any]:
        run = Run(
            keras_dist.size(), is_oracle, self.is_traced, Path(folder), self.is_global
        )
        with models_in(self.dtype):
            keras.utils.set_random_seed(5)
            return dict(_named_arrays(self.train(run)))


@dataclass
class Registry:
    """The ways of a file, in their order; `is_traced` is that of all of them."""

    part: str
    is_traced: bool = False
    ways: list[Way] = field(default_factory=list)

    def way(self, name: str, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Add the decorated function, which trains, given a run and `args`."""

        def add(train: Callable[..., Any]) -> Callable[..., Any]:
            given = {"is_traced": self.is_traced} | options
            self.ways.append(
                Way(self.part, name, lambda run: train(run, *args), **given)
            )
            return train

        return add


def _named_arrays(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, keras.callbacks.History):
        logs = found.history
        known = {key: logs[key] for key in logs if key != "rows_per_second"}
        yield from _named_arrays(known, name + "logs ")
    elif isinstance(found, keras.Model):
        weights = {f"weight {i}": weight for i, weight in enumerate(found.weights)}
        optimizer = getattr(found, "optimizer", None)
        yield from _named_arrays([weights, optimizer], name)
    elif isinstance(found, keras.optimizers.Optimizer):
        yield from _named_arrays([v.value for v in found.variables], name + "state ")
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from _named_arrays(value, f"{name}{key} ")
    elif isinstance(found, (list, tuple)):
        for index, value in enumerate(found):
            yield from _named_arrays(value, f"{name}{index} ")
    elif found is not None:
        array = keras.ops.convert_to_numpy(found)
        yield name.strip(), np.asarray(array, dtype="float64")
