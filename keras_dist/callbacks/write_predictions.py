"""Write predictions to files, batch by batch."""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.training.predict import each_batch

# Which rows a batch of predictions are: for each one, the number of its batch in the
# order of the data, and of its row in that; `None` if they are no rows of this rank.
Place = Callable[[int, int], tuple[Any, Any] | None]

# Rows that are collected before they are written to a Parquet file.
_ROWS_OF_GROUP = 10_000


class WritePredictions(keras.callbacks.Callback):
    """Writes each rank's predictions to files as they come, however many they are.

    Pass it to `DistributedModel.predict`, which then keeps no predictions in memory,
    gathers none, and returns `None`. With `Model.predict` on one process it writes the
    same files, and Keras keeps the predictions, too.

    Each rank R writes `NAME.rank-R.npy` for each array of outputs, where NAME is
    `predictions`, or the names and indices in a dict, list or tuple of outputs, joined
    by dots; and `batch.rank-R.npy` and `row.rank-R.npy`, the number of each row's batch
    in the order of the data, and of the row in that batch. `read` puts the rows of all
    ranks in order. With `format="parquet"` it is one file a rank, `rank-R.parquet`,
    with these columns; outputs of several dimensions are nested lists.

    Args:
        path: A folder, which all ranks see or each host has; it is made if needed. It
            must not have predictions of these ranks in it.
        format: `"npy"` or `"parquet"`, which needs pyarrow.

    Raises:
        ValueError: If `format` is unknown. In `predict`, if the folder has predictions
            already, or NumPy files cannot hold the outputs (ragged ones, objects).
        ImportError: In `predict`, if pyarrow is missing.
    """

    def __init__(self, path: str | os.PathLike[str], format: str = "npy") -> None:
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

    def on_predict_begin(self, logs: Any = None) -> None:
        rank, size = comm.rank(), comm.size()
        self.path.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.path.iterdir()):
            found = re.search(r"(?:^|\.)rank-(\d+)\.(?:npy|parquet)$", file.name)
            if found and (int(found[1]) == rank or int(found[1]) >= size):
                raise ValueError(
                    "Predictions would be mixed with those of another run. Received: "
                    f"path={os.fspath(self.path)!r}, which has {file.name!r}. Give "
                    "another folder, or delete these files."
                )
        kind = _NpyFiles if self.format == "npy" else _ParquetFile
        self._table, self._step = kind(self.path, rank), 0

        if not self._is_fed:  # by `DistributedModel.predict`
            self._feeding.close()
            self._feeding.enter_context(each_batch(self.model, self._write))

    def on_predict_end(self, logs: Any = None) -> None:
        self._feeding.close()
        if self._table is not None:
            self._table.close()
        self._table = None

    def _write(self, outputs: Any, place: Place | None = None) -> Any:
        assert self._table is not None  # predict has begun
        columns = dict(_named(outputs))
        count = max(int(leaf.shape[0]) for leaf in columns.values())
        found = (place or _in_order)(self._step, count)
        self._step += 1
        if found is not None:
            batch, row = (np.broadcast_to(each, [count]) for each in found)
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
        """
        by_name: dict[str, list[np.ndarray]] = {}
        for file in sorted(Path(path).glob("*.rank-*.npy")):
            name = file.name.rpartition(".rank-")[0]
            by_name.setdefault(name, []).append(np.load(file, mmap_mode="r"))
        if "batch" not in by_name:
            raise FileNotFoundError(
                f"There are no predictions to read. Received: path={os.fspath(path)!r} "
                "without files of WritePredictions. For Parquet use a reader of it, "
                "and sort the rows by `batch` and `row`."
            )
        batch, row = (np.concatenate(by_name.pop(name)) for name in ("batch", "row"))
        order = np.lexsort((row, batch))
        whole = {name: np.concatenate(parts)[order] for name, parts in by_name.items()}
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


class _Table:
    """One rank's files.

    Args:
        path: The folder.
        rank: This rank.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank

    def append(self, columns: dict[str, Any]) -> None:
        """Add rows to all columns."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left."""


class _NpyFiles(_Table):
    """A file for each column, which is valid after each batch."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
        self._files: dict[str, Any] = {}
        self._rows = 0

    def append(self, columns: dict[str, Any]) -> None:
        for name, values in columns.items():
            if isinstance(values, tf.RaggedTensor) or values.dtype.hasobject:
                raise ValueError(
                    "NumPy files hold arrays of numbers. Received: an output "
                    f"{name!r} of type {type(values).__name__}. Write "
                    'WritePredictions(path, format="parquet").'
                )
        rows = self._rows + len(columns["batch"])
        for name, values in columns.items():
            if name not in self._files:
                path = self._path / f"{name}.rank-{self._rank}.npy"
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

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
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
        lists = {
            name: values.to_list()
            for name, values in columns.items()
            if isinstance(values, tf.RaggedTensor)
        }
        lists |= {
            name: values if values.ndim == 1 else values.tolist()
            for name, values in columns.items()
            if name not in lists
        }
        self._waiting.append(self._arrow.table(lists))
        if sum(table.num_rows for table in self._waiting) >= _ROWS_OF_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = self._arrow.concat_tables(self._waiting)
        self._waiting.clear()
        if self._writer is None:
            path = self._path / f"rank-{self._rank}.parquet"
            self._writer = self._parquet.ParquetWriter(path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
