"""A checkpoint is complete or absent, whatever happens while it is written."""

import errno
import hashlib
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keras_dist
from keras_dist.checkpoint import files
from keras_dist.checkpoint.files import decoded, encoded
from keras_dist.checkpoint.lock import FolderLock
from keras_dist.training.saving import atomic

FILES = Path(keras_dist.__file__).parent / "checkpoint" / "files.py"

# Without TensorFlow, which takes longer to import than the test runs.
_LOAD = f"""
import importlib.util, os, random, signal, sys, time
import numpy as np
spec = importlib.util.spec_from_file_location("files", {str(FILES)!r})
files = sys.modules["files"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
"""

_KILLED = (
    _LOAD
    + """
folder = files.Folder(sys.argv[1])
folder.prepare()
begin = time.monotonic()
for count in range(5):
    folder.write({"count": 0, "array": np.zeros(2**18)})
one = (time.monotonic() - begin) / 5
random.seed(0)
last, kept = 0, folder.keep
killed = while_writing = 0
# More often where the machine is busy, and children are killed before they write.
while killed < 50 or (min(last, 2 * while_writing) <= 10 and killed < 1000):
    child = os.fork()
    if child == 0:
        tree, _ = folder.newest()
        while True:
            count = tree["count"] + 1
            tree = {"count": count, "array": np.full(2**18, float(count))}
            folder.write(tree)
    time.sleep(random.random() * 4 * one)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed += 1
    while_writing += os.path.exists(os.path.join(folder.path, ".checkpoint.part"))
    tree, damaged = folder.newest()
    assert not damaged, damaged
    assert (tree["array"] == tree["count"]).all() and tree["count"] >= last
    last = tree["count"]
    # It may be killed before it removes one; the next one that is written removes all.
    numbers = folder.numbers()
    assert len(numbers) <= kept + 1, numbers
    kept = max(folder.keep, len(numbers))
folder.write(tree)
assert len(os.listdir(folder.path)) == folder.keep, os.listdir(folder.path)
assert last > 10 and while_writing > 5, (last, while_writing)
print("killed", killed, "times,", while_writing, "of them in a file;", last, "written")
"""
)


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path):
    """Fifty times or more, at random moments; what was there before is never lost."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "folder")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.match(r"killed \d+ times", done.stdout), done.stderr


@pytest.fixture
def folder(tmp_path):
    """With two checkpoints, of 1 and 2."""
    made = files.Folder(str(tmp_path / "folder"))
    made.prepare()
    for count in (0, 1, 2):
        made.write({"count": count, "array": np.full(1000, count)})
    assert made.numbers() and len(made.numbers()) == 2
    return made


def counted(folder):
    """The count in the newest valid checkpoint, and how many are damaged."""
    tree, damaged = files.Folder(folder.path).newest()
    assert (tree["array"] == tree["count"]).all()
    return tree["count"], len(damaged)


def test_a_damaged_file_is_replaced_by_the_one_before(folder):
    """Cut short anywhere, or with one bit changed anywhere; the next replaces it."""
    newest = Path(folder.file(folder.number))
    whole = newest.read_bytes()
    for length in (*range(0, 400, 7), len(whole) - 1):
        newest.write_bytes(whole[:length])
        assert counted(folder) == (1, 1)
    generator = np.random.default_rng(0)
    for position in (*range(0, 400, 13), *generator.integers(0, len(whole), 100)):
        changed = bytearray(whole)
        changed[position] ^= 1 << int(generator.integers(8))
        newest.write_bytes(changed)
        assert counted(folder) == (1, 1), position
    again = files.Folder(folder.path)
    again.newest()
    again.write({"count": 3, "array": np.full(1000, 3)})
    assert counted(folder) == (3, 0) and len(folder.numbers()) == 2


def test_a_forged_checkpoint_runs_no_code(folder, tmp_path):
    """With a checksum that fits: objects, wrong sizes, and no tree are refused."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (f"{tmp_path}/sprung",))

    payload = pickle.dumps(Trap())
    newest = Path(folder.file(folder.number))
    for head, text in (
        ({"bytes": 12, "arrays": [{"shape": [1], "dtype": "object"}]}, b'{"array": 0}'),
        ({"bytes": 12, "arrays": [{"shape": [-9], "dtype": "int8"}]}, b'{"array": 0}'),
        ({"bytes": 12, "arrays": [{"shape": [1], "dtype": "tea"}]}, b'{"array": 0}'),
        ({"bytes": 12, "arrays": []}, b'{"array": 5}'),
        ({"bytes": 12, "arrays": []}, b"{}          "),
        ({"arrays": []}, b""),
        ({"bytes": 900_000, "arrays": []}, b'{"list":[' * 100_000),
        ({"bytes": 5500, "arrays": []}, b'{"list":[' * 500 + b"]}" * 500),
        ([], b""),
    ):
        body = json.dumps(head).encode() + b"\n" + text + payload
        digest = hashlib.sha256(body).hexdigest().encode()
        newest.write_bytes(b"keras_dist checkpoint 2\n" + digest + b"\n" + body)
        assert counted(folder) == (1, 1), head
    newest.write_bytes(payload)
    assert counted(folder) == (1, 1)
    assert not (tmp_path / "sprung").exists()


def test_no_link_is_followed(folder, tmp_path):
    """Which another account has put where a part, a lock or a draft is written."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    part, lock = Path(folder.part), FolderLock(folder.path)
    model = tmp_path / "model.keras"
    draft = tmp_path / ".keras_dist.0.model.keras"
    for write in (
        folder.prepare,
        lambda: folder.reserve(1000),
        lambda: folder.write({"count": 3, "array": np.full(1000, 3)}),
        lambda: atomic.replace(model, lambda at: Path(at).write_text("model")),
        lambda: atomic.replace(
            model, lambda at: Path(at).write_text("model"), num_bytes=1000
        ),
    ):
        for path in (part, draft):
            path.unlink(missing_ok=True)
            path.symlink_to(secret)
        write()
        assert secret.read_text() == "mine"
    part.unlink()
    assert counted(folder) == (3, 0) and model.read_text() == "model"
    Path(lock.path).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        lock.take()
    assert secret.read_text() == "mine"


_HOLDS = """
import os, sys, time
from keras_dist.checkpoint.lock import FolderLock
lock = FolderLock(sys.argv[1])
lock.take()
if os.fork() == 0:  # as a process that loads data, which may live longer
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def test_one_training_at_a_time_has_a_folder(folder, monkeypatch):
    """Until it ends, however it does; where there are no locks, too."""
    own = FolderLock(folder.path)
    for has_locks in (True, False):
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDS, folder.path],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as holder:
            try:
                assert holder.stdout.readline() == "held\n"
                if not has_locks:  # as on some network file systems

                    def refuse(*_):
                        raise OSError(errno.ENOLCK, "No locks available")

                    monkeypatch.setattr("fcntl.flock", refuse)
                named = f"process {holder.pid} on host {os.uname().nodename}, since 2"
                with pytest.raises(RuntimeError, match=named) as found:
                    own.take()
                assert f"remove {own.path}" in str(found.value)
                holder.kill()
                holder.wait()
                own.take()
            finally:
                os.killpg(holder.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"process {os.getpid()} on host"):
            FolderLock(folder.path).take()
        own.release()
        assert not os.path.exists(own.path)
    # A process of another host, of which nothing can be known from here.
    held = {"host": "b", "pid": 1, "begin": "then"}
    Path(own.path).write_text(json.dumps(held))
    with pytest.raises(RuntimeError, match="process 1 on host b, since then"):
        own.take()
    Path(own.path).write_text("rubbish")
    own.take()
    own.release()


def test_a_folder_with_damaged_checkpoints_only_is_an_error(folder):
    """And not a training from the beginning, which would overwrite it."""
    for number in folder.numbers():
        Path(folder.file(number)).write_bytes(b"tea")
    with pytest.raises(files.DamagedError, match="does not begin"):
        files.Folder(folder.path).newest()


def test_a_full_disk_leaves_the_checkpoints_before(folder):
    """No file may grow: an error, no rest of a file, and both are still there."""
    before = sorted(os.listdir(folder.path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.write({"count": 3, "array": np.full(1000, 3)})
        with pytest.raises(OSError, match="too large"):
            folder.reserve(8000)
        folder.prepare()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(folder.path)) == before and counted(folder) == (2, 0)
    folder.reserve(8000)
    with pytest.raises(OSError):  # too large for a file, or for the disk
        folder.reserve(2**60)
    assert sorted(os.listdir(folder.path)) == before


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    """Below a file, where even root cannot create one."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.Folder(str(tmp_path / "file" / "folder")).prepare()


def test_values_come_back_as_they_were(tmp_path):
    """Numbers, text, arrays of every kind, and structures of them."""
    value = {
        "best": [np.float32(0.1), np.arange(3, dtype="int8"), np.zeros((0, 2))],
        3: (None, True, -7, 0.1, float("inf"), "tea ☕"),
        "scalar": np.array(2.5, "float16"),
        "many": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    folder = files.Folder(str(tmp_path))
    folder.write({"value": encoded(value)})
    again = decoded(folder.newest()[0]["value"])
    assert repr(again) == repr(value)
    assert again["best"][1].dtype == "int8" and again["best"][2].shape == (0, 2)
    with pytest.raises(TypeError, match="can be saved"):
        encoded({"function": print})
