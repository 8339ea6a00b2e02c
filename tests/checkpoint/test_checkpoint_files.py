"""A checkpoint is complete or absent, whatever happens while it is written."""

import errno
import hashlib
import io
import os
import pickle
import re
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from harness.launching import launch, start

from keras_dist.checkpoint import files
from keras_dist.checkpoint.files import to_json

_KILLED = """
import os, random, signal, sys, time
import numpy as np
from keras_dist.checkpoint import files
folder = files.Folder(sys.argv[1])
os.mkdir(folder.path)
begin = time.monotonic()
for count in range(5):
    folder.write({"count": 0, "array": np.zeros(2**18)})
one = (time.monotonic() - begin) / 5
random.seed(0)
last, kept = 0, files.KEPT
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
    kept = max(files.KEPT, len(numbers))
folder.write(tree)
assert len(os.listdir(folder.path)) == files.KEPT, os.listdir(folder.path)
assert last > 10 and while_writing > 5, (last, while_writing)
print("killed", killed, "times,", while_writing, "of them in a file;", last, "written")
"""


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path):
    """Fifty times or more, at random moments; what was there before is never lost."""
    command = [sys.executable, "-c", _KILLED, tmp_path / "folder"]
    done = launch(command, timeout=120)
    assert re.match(r"killed \d+ times", done.stdout), done.stderr


@pytest.fixture
def folder(tmp_path):
    """With two checkpoints, of 1 and 2."""
    made = files.Folder(str(tmp_path))
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
    trap = np.array([Trap()])
    for text, arrays in (
        (b'{"$array": 0}', [trap]),
        (b'{"$array": 0, "dtype": "tea"}', [np.zeros(1)]),
        (b'{"$array": 0, "dtype": "object"}', [np.zeros(1)]),
        (b'{"$array": 5}', []),
        (b'{"$scalar": 1}', []),
        (b'{"$items": 1}', []),
        (b"[" * 100_000, []),
        (b"[" * 100_000 + b"]" * 100_000, []),
        (b"", []),
    ):
        body = io.BytesIO()
        np.savez(body, *arrays, header=np.frombuffer(text, np.uint8))
        for content in (body.getvalue(), body.getvalue()[:-9], text + payload):
            digest = hashlib.sha256(content).hexdigest()
            last_line = f"\nkeras_dist checkpoint 3, sha256 {digest}\n".encode()
            newest.write_bytes(content + last_line)
            assert counted(folder) == (1, 1), text
    newest.write_bytes(payload)
    assert counted(folder) == (1, 1)
    assert not (tmp_path / "sprung").exists()


def test_a_file_of_another_format_is_not_taken_for_an_empty_folder(folder):
    """The error says which format this version reads."""
    for number in folder.numbers():
        Path(folder.file(number)).write_bytes(b"keras_dist checkpoint 2\n" + b"0" * 500)
    with pytest.raises(files.DamagedError, match="format 3"):
        files.Folder(folder.path).newest()


@pytest.mark.parametrize("failures", [1, 99])
def test_a_file_that_cannot_be_read_now_is_not_damaged(folder, monkeypatch, failures):
    """It is read again; then an error names it, and nothing overwrites it."""
    newest = folder.file(folder.number)
    opened = []

    def fail_at_first(path, *args, **kwargs):
        opened.append(path)
        if len(opened) <= failures:  # as `read` does, without the path
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open(path, *args, **kwargs)

    monkeypatch.setattr(files, "open", fail_at_first, raising=False)
    monkeypatch.setattr(files, "_WAITS", (0.0, 0.0))
    if failures == 1:
        assert counted(folder) == (2, 0)
    else:
        with pytest.raises(OSError, match=f"Stale file handle: '{newest}'"):
            files.Folder(folder.path).newest()
    assert opened == [newest] * min(failures + 1, 3)


def test_no_link_is_followed(folder, tmp_path):
    """Which another account has put where a part or a lock is written."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    part = Path(folder.part)
    part.symlink_to(secret)
    folder.write({"count": 3, "array": np.full(1000, 3)})
    assert secret.read_text() == "mine"
    assert counted(folder) == (3, 0)
    (Path(folder.path) / ".checkpoint.lock").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"), folder.lock():
        pass
    assert secret.read_text() == "mine"


_HOLDS = """
import os, sys, time
from keras_dist.checkpoint.files import Folder
lock = Folder(sys.argv[1]).lock()
lock.__enter__()
if os.fork() == 0:  # as a process that loads data, which may live longer
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def test_one_training_at_a_time_has_a_folder(folder, monkeypatch):
    """Until it ends, however it does; a process that it has forked does not have it."""
    lock = Path(folder.path) / ".checkpoint.lock"
    lock.write_text("rubbish")  # of a host that has crashed
    command = [sys.executable, "-c", _HOLDS, folder.path]
    with start(command, start_new_session=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            named = f"process {holder.pid} on host {os.uname().nodename}, since 2"
            with pytest.raises(RuntimeError, match=named) as found, folder.lock():
                pass
            assert f"in {lock}" in str(found.value)
            assert "remove" not in str(found.value)  # its holder lives
            monkeypatch.setenv("KERAS_DIST_LOCK_SECONDS", "60")
            threading.Timer(1, holder.kill).start()
            with folder.lock():  # waits for its end
                monkeypatch.undo()
                other = files.Folder(folder.path)
                for _ in range(2):  # the first error has not given the lock back
                    with pytest.raises(RuntimeError, match="another fit"), other.lock():
                        pass
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
    umask = os.umask(0o002)
    os.remove(lock)
    with other.lock():
        assert lock.stat().st_mode & 0o777 == 0o664  # for a group that shares it
    os.umask(umask)


def test_a_file_system_without_locks_is_a_warning(folder, monkeypatch):
    """As Lustre may be mounted: the training is not refused."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with pytest.warns(UserWarning, match="has no locks"), folder.lock():
        folder.write({"count": 3, "array": np.full(1000, 3)})


def test_values_come_back_as_they_were(tmp_path):
    """Numbers, text, arrays of every kind, and structures of them."""
    value = {
        "best": [np.float32(0.1), np.arange(3, dtype="int8"), np.zeros((0, 2))],
        3: (None, True, -7, 0.1, float("inf"), "tea ☕"),
        "scalar": np.array(2.5, "float16"),
        "many": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "swapped": np.arange(3, dtype=">i4"),
        "short": np.ones((2, 1), "bfloat16"),
        "fields": np.zeros(2, [("a", "f4"), ("b", "U3")]),
        "marks": {"$tuple": [1], "$array": 0},
    }
    folder = files.Folder(str(tmp_path))
    folder.write({"value": to_json(value)})
    again = folder.newest()[0]["value"]
    assert repr(again) == repr(value)
    assert again["best"][1].dtype == "int8" and again["best"][2].shape == (0, 2)
    with np.load(folder.file(1)) as file:  # without this package
        assert file["arr_1"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="can be saved"):
        to_json({"function": print})
