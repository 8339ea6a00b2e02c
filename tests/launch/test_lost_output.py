"""Ranks save, or go on, when nobody reads their output or its disk is full."""

import fcntl
import os
import pty
import signal
import termios
import time

import pytest
from harness.launching import RUN, start, until, wait_for_files, write_script

# Each rank says that it is there, prints in a way, and leaves a file; a third argument
# is the size of what it prints. SIGTERM asks it to save, which takes some seconds.
_PRINTS = """
import os, signal, sys, time
from pathlib import Path
folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["HOROVOD_RANK"]

def save(*_):
    time.sleep(3)
    print("x" * 300_000, flush=True)
    (folder / f"saved.{rank}").touch()
    os._exit(0)

signal.signal(signal.SIGTERM, save)
print("there", flush=True)
(folder / f"there.{rank}").touch()
time.sleep(1)
for _ in range(3):
    print("y" * (size // 3), flush=True)
(folder / f"done.{rank}").touch()
time.sleep(1000 if size < 9 else 0)
"""


@pytest.fixture
def words(tmp_path):
    """The command of two ranks that print as much as its last word says."""
    return [*RUN, "-np", 2, write_script(tmp_path, _PRINTS), tmp_path]


def files(folder, name):
    return [folder / f"{name}.{rank}" for rank in range(2)]


def test_a_closed_terminal_leaves_time_to_save(words, tmp_path, left_behind):
    """It sends SIGHUP, and what is printed afterwards is an error."""
    terminal, end = pty.openpty()
    both = {"stdin": end, "stdout": end, "stderr": end, "start_new_session": True}

    def lead():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where `nohup` runs these tests
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = start([*words, 0], **both, preexec_fn=lead)
    os.close(end)
    wait_for_files(*files(tmp_path, "there"))
    os.close(terminal)
    assert process.wait(timeout=20) == 128 + signal.SIGHUP
    assert all(file.exists() for file in files(tmp_path, "saved"))


def test_an_output_that_cannot_be_written_ends_alone(words, tmp_path, left_behind):
    """A pipe that is closed (`| head`), a full disk: a line names it, once."""
    process = start([*words, 300_000])
    assert process.stdout.readline().endswith("there\n")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=20) == 0, errors
    assert errors.count("standard output") == 1 and "Broken pipe" in errors, errors
    with open("/dev/full", "w") as full:
        process = start([*words, 300_000], stdout=full)
    errors = process.stderr.read()
    assert process.wait(timeout=20) == 0, errors
    assert "standard output (/dev/full) cannot be written" in errors, errors
    assert "No space left on device" in errors, errors


def test_a_log_that_cannot_be_written_ends_alone(words, tmp_path, left_behind):
    """Its file is named; that of the other rank, and the screen, have all."""
    logs, limit = tmp_path / "logs", 'ulimit -f 200; exec "$@"'
    words = [*words[:6], "--log-dir", logs, *words[6:]]
    process = start(["sh", "-c", limit, "sh", *words, 300_000])
    stdout, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert stdout.count("y") == 300_000
    for rank in range(2):
        name = str(logs / f"rank.{rank}.log")
        assert errors.count(name) == 1 and "File too large" in errors, errors
        assert 0 < os.path.getsize(name) < 300_000
    assert all(file.exists() for file in files(tmp_path, "done"))


def test_sigterm_is_answered_while_nobody_reads(words, tmp_path, left_behind):
    """The ranks, which wait for a reader, are asked to save, and do."""
    reader, writer = os.pipe()
    process = start([*words, 9_000_000], stdout=writer, stderr=writer)
    os.close(writer)
    wait_for_files(*files(tmp_path, "there"))
    time.sleep(3)  # all pipes are full
    assert not any(file.exists() for file in files(tmp_path, "done"))
    process.send_signal(signal.SIGTERM)
    until(lambda: process.poll() is not None, "its end", 20)
    assert process.returncode == 128 + signal.SIGTERM
    assert all(file.exists() for file in files(tmp_path, "saved"))
    os.close(reader)
