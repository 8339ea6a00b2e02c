"""Data of Grain, Hugging Face and torchdata resumes in the middle of an epoch."""

import json
import sys
from collections import Counter

import pytest
from launch import launch

_SCRIPT = "tests/pipelines/trains.py"


@pytest.mark.parametrize(
    ("kind", "is_skipped"),
    [
        ("grain_map", False),
        ("grain_iter", False),
        ("grain_loader", False),
        ("torchdata_loader", False),
        ("torchdata_workers", False),
        ("hugging_face", False),
        ("hugging_face_shuffled", True),
    ],
)
def test_data_of_a_library_resumes_at_the_next_batch(tmp_path, kind, is_skipped):
    """On two ranks to the bit; on three, each row of each epoch is read once.

    Rows in a buffer that shuffles are not in a state: then batches are left out.
    """
    for ranks in (2, 3):
        command = [sys.executable, _SCRIPT, str(tmp_path), kind]
        done = launch(command, ranks=ranks, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert "resumed in epoch 2, after 6 batches" in done.stdout, done.stdout
        is_said = "6 batches of epoch 2 are read and left out" in done.stdout
        assert is_said == is_skipped
    before, after = (
        json.loads((tmp_path / name).read_text())
        for name in ("cut.2.end.json", "three.3..json")
    )
    begin = min(map(int, after[0]))
    read = [
        row
        for of_rank in before + after
        for update, rows in of_rank.items()
        if of_rank in after or int(update) < begin
        for row in rows
    ]
    assert Counter(read) == dict.fromkeys(range(101), 3)
