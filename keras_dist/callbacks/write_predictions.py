"""Write predictions to files, batch by batch."""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.training.predict import each_batch

# Which rows a batch of predictions are: for each one, the number of its batch in the
# order of the data, and of its row in that; `None` if they are no rows of this rank.
Place = Callable[[int, int], tuple[Any, Any] | None]

# How the names of files end.
_RANK = re.compile(r"\.?rank-(\d+)-of-(\d+)\.(?:npy|parquet)$")

# Rows that are collected before they are written to a Parquet file.
_ROWS_OF_GROUP = 10_000


class WritePredictions(keras.callbacks.Callback):
    """Writes each rank's predictions to files as they come, however many they are.

    Pass it to `DistributedModel.predict`, which then keeps no predictions in memory,
    gathers none, and returns `None`. With `Model.predict` on one process it writes the
    same files, and Keras keeps the predictions, too.

    Rank R of N writes `NAME.rank-R-of-N.npy` for each array of outputs. NAME is
    `predictions`, or the names and indices in a dict, list or tuple of outputs, joined
    by dots; `batch` and `row` are the number of each row's batch in the order of the
    data, and of the row in that batch. `read` puts the rows of all ranks in order. With
    `format="parquet"` each rank has one file, `rank-R-of-N.parquet`, with these
    columns; outputs of several dimensions are nested lists.

    Args:
        path: A folder, which all ranks see or each host has; it is made if needed. It
            must not have predictions in it.
        format: `"npy"` or `"parquet"`, which needs pyarrow.

    Raises:
        ValueError: If `format` is unknown. In `predict`, if the folder has predictions
            already, an output has not one value for each row, or NumPy files cannot
            hold it (ragged, objects, another shape than in the batch before).
        ImportError: In `predict`, if pyarrow is missing.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = WritePredictions(folder)
    ...     _ = model.predict(np.ones((8, 2)), verbose=0, callbacks=[writer])
    ...     WritePredictions.read(folder).shape
    (8, 1)
    """

    def __init__(
        self, path: str | os.PathLike[str], format: Literal["npy", "parquet"] = "npy"
    ) -> None:
        super().__init__()
        if format not in ("npy", "parquet"):
            raise ValueError(
                f'`format` must be "npy" or "parquet". Received: format={format!r}'
            )
        self.path, self.format = Path(path), format
        self._is_fed = False
        self._feeding = contextlib.ExitStack()
        self._step = 0
        self._table: _Table | None = None

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        rank, size = comm.rank(), comm.size()
        self.path.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.path.iterdir()):
            found = _RANK.search(file.name)
            # Another rank may have begun.
            if found and (int(found[1]) == rank or int(found[2]) != size):
                raise ValueError(
                    "Predictions would be mixed with those of another run. Received: "
                    f"path={os.fspath(self.path)!r}, which has {file.name!r}. Give "
                    "another folder, or delete these files."
                )
        kind = _NpyFiles if self.format == "npy" else _ParquetFile
        self._table, self._step = kind(self.path, f"rank-{rank}-of-{size}"), 0
        if not self._is_fed:  # by `DistributedModel.predict`
            self._feeding.close()
            self._feeding.enter_context(each_batch(self.model, self._write))

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._feeding.close()
        if self._table is not None:
            self._table.close()
        self._table = None

    def _write(self, outputs: Any, place: Place | None = None) -> Any:
        assert self._table is not None  # predict has begun
        columns = dict(_named(outputs))
        shapes = {name: tuple(values.shape) for name, values in columns.items()}
        counts = {int(shape[0]) if shape else -1 for shape in shapes.values()}
        if len(counts) != 1 or -1 in counts or {"batch", "row"} & set(columns):
            raise ValueError(
                "Outputs are written row by row, beside the columns `batch` and `row`. "
                f"Received: outputs of the shapes {shapes}. Give each row one value of "
                "each output, and outputs other names."
            )
        [count] = counts
        found = (place or _in_order)(self._step, count)
        self._step += 1
        if found is None:  # files without rows: nothing is missing
            columns = {name: values[:0] for name, values in columns.items()}
            found, count = (0, np.arange(0)), 0
        batch, row = (np.broadcast_to(np.asarray(each), [count]) for each in found)
        keys = {"batch": batch.astype("int64"), "row": row.astype("int64")}
        self._table.append(keys | columns)
        return outputs

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Any:
        """Read the NumPy files of all ranks, and put their rows in order.

        Args:
            path: The folder. Files of all hosts have to be in it.

        Returns:
            An array of the predictions of all rows, or a dict of arrays.

        Raises:
            FileNotFoundError: If there are none.
            ValueError: If files of some ranks are missing, or were not written to their
                end.
        """
        sizes: set[int] = set()
        by_name: dict[str, dict[int, np.ndarray]] = {}
        for file in sorted(Path(path).glob("*.npy")):
            if found := _RANK.search(file.name):
                name, rank = file.name[: found.start()], int(found[1])
                by_name.setdefault(name, {})[rank] = np.load(file, mmap_mode="r")
                sizes.add(int(found[2]))
        if "batch" not in by_name:
            raise FileNotFoundError(
                f"There are no predictions to read. Received: path={os.fspath(path)!r} "
                "without files of WritePredictions. For Parquet use a reader of it, "
                "and sort the rows by `batch` and `row`."
            )
        ranks = range(max(sizes))
        rows = {rank: len(part) for rank, part in by_name["batch"].items()}
        is_whole = all(
            {rank: len(part) for rank, part in parts.items()} == rows
            for parts in by_name.values()
        )
        if len(sizes) > 1 or sorted(rows) != list(ranks) or not is_whole:
            raise ValueError(
                "Predictions are missing. Received: the files of ranks "
                f"{sorted(rows)} of {', '.join(map(str, sorted(sizes)))}, with "
                f"{list(rows.values())} rows. Copy the files of all hosts into one "
                "folder, and let `predict` come to its end."
            )
        whole = {
            name: np.concatenate([parts[rank] for rank in ranks])
            for name, parts in by_name.items()
        }
        order = np.lexsort((whole.pop("row"), whole.pop("batch")))
        whole = {name: values[order] for name, values in whole.items()}
        return whole["predictions"] if set(whole) == {"predictions"} else whole


@contextlib.contextmanager
def writing(
    writers: Sequence[WritePredictions], place: Place
) -> Iterator[Callable[[Any], Any]]:
    """Inside the block, the callbacks leave it to a function to write each batch.

    Args:
        writers: Those in the list of callbacks.
        place: Which rows a batch is.

    Yields:
        The function: it writes the outputs of a batch, and returns no rows of them.
    """

    def written(outputs: Any) -> Any:
        for writer in writers:
            writer._write(outputs, place)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[:0], outputs
        )

    for writer in writers:
        writer._is_fed = True
    try:
        yield written
    finally:
        for writer in writers:
            writer._is_fed = False
            writer.on_predict_end()  # after an error, too


def _in_order(step: int, count: int) -> tuple[Any, Any]:
    """Number the rows of one process's batches."""
    return step, np.arange(count)


def _named(outputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each array of outputs."""
    if isinstance(outputs, dict):
        parts: Any = outputs.items()
    elif isinstance(outputs, (list, tuple)):
        parts = enumerate(outputs)
    else:
        if isinstance(outputs, tf.RaggedTensor):
            yield name or "predictions", outputs
        elif outputs is not None:
            yield name or "predictions", np.asarray(outputs)
        return
    for key, part in parts:
        yield from _named(part, f"{name}.{key}" if name else str(key))


def _as_list(values: Any) -> Any:
    if isinstance(values, tf.RaggedTensor):
        return values.to_list()
    return values if values.ndim == 1 else values.tolist()


class _Table:
    """One rank's files.

    Args:
        path: The folder.
        end: What their names end with.
    """

    def __init__(self, path: Path, end: str) -> None:
        self._path, self._end = path, end

    def append(self, columns: dict[str, Any]) -> None:
        """Add rows to all columns."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left."""


class _NpyFiles(_Table):
    """A file for each column, which is valid after each batch."""

    def __init__(self, path: Path, end: str) -> None:
        super().__init__(path, end)
        self._files: dict[str, Any] = {}
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._rows = 0

    def append(self, columns: dict[str, Any]) -> None:
        for name, values in columns.items():
            is_ragged = isinstance(values, tf.RaggedTensor)
            kind = values.dtype, tuple(values.shape[1:])
            if (
                is_ragged
                or values.dtype.hasobject
                or (self._kinds.setdefault(name, kind) != kind)
            ):
                raise ValueError(
                    "NumPy files hold arrays of numbers, with rows of one shape. "
                    f"Received: an output {name!r}, {type(values).__name__} of "
                    f"{values.dtype} and rows of shape {kind[1]}. Write "
                    'WritePredictions(path, format="parquet").'
                )
        rows = self._rows + len(columns["batch"])
        for name, values in columns.items():
            if name not in self._files:
                path = self._path / f"{name}.{self._end}.npy"
                self._files[name] = open(path, "wb")  # noqa: SIM115 - till `close`
                self._write_header(name, values, 0)
            self._files[name].write(np.ascontiguousarray(values).tobytes())
            self._write_header(name, values, rows)
        self._rows = rows

    def _write_header(self, name: str, values: np.ndarray, rows: int) -> None:
        # NumPy leaves room in it for a number of rows that grows.
        file = self._files[name]
        file.seek(0)
        described = {
            "descr": np.lib.format.dtype_to_descr(values.dtype),
            "fortran_order": False,
            "shape": (rows, *values.shape[1:]),
        }
        np.lib.format.write_array_header_1_0(file, described)
        file.seek(0, os.SEEK_END)
        file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _ParquetFile(_Table):
    """One file with all columns."""

    def __init__(self, path: Path, end: str) -> None:
        super().__init__(path, end)
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            self._parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ImportError(
                f"Parquet files need pyarrow. Received: {error}. Run: pip install "
                "'keras-dist[parquet]'"
            ) from error
        self._writer: Any = None
        self._waiting: list[Any] = []

    def append(self, columns: dict[str, Any]) -> None:
        if not len(columns["batch"]):
            return  # whose types nobody knows
        lists = {name: _as_list(values) for name, values in columns.items()}
        self._waiting.append(self._arrow.table(lists))
        if sum(table.num_rows for table in self._waiting) >= _ROWS_OF_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = self._arrow.concat_tables(self._waiting)
        self._waiting.clear()
        if self._writer is None:
            path = self._path / f"{self._end}.parquet"
            self._writer = self._parquet.ParquetWriter(path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
