"""One job is one run of Weights & Biases, with the metrics of all ranks."""

import importlib
import json
import struct

import pytest
from harness.launching import launch
from harness.needs import needs

pytestmark = needs("libraries", "wandb")

_SCRIPT = "tests/trackers/logs_wandb.py"
_OURS = {"epoch/rows_per_second", "epoch/effective_learning_rate"}


def records_of(path):
    """The records of a run's log: LevelDB's format for logs, after 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a header is in one block
            at += left
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def history_of(folder):
    """What the only run in a folder has logged: a dict for each epoch."""
    (path,) = folder.rglob("*.wandb")
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for data in records_of(path):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found = {i.key or "/".join(i.nested_key): i.value_json for i in items}
            rows.append({name: json.loads(found[name]) for name in found})
    return rows


def test_a_job_is_one_run_with_the_metrics_of_one_process(tmp_path):
    """Each epoch once; and the checkpoint is written once."""
    logged = []
    for ranks, more in ((2, []), (None, ["plain"])):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch([_SCRIPT, folder, *more], ranks=ranks, check=True)
        assert (folder / "best.keras").exists()
        logged.append(history_of(folder))
    ours, plain = logged
    assert len(ours) == len(plain) == 3
    for row, expected in zip(ours, plain, strict=True):
        assert set(row) - _OURS == set(expected)
        for name in set(expected) - {"_runtime", "_timestamp"}:
            assert row[name] == pytest.approx(expected[name], abs=1e-5), name
