"""What ranks print reaches the screen whole, whatever it is, and holds up nothing."""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest
from harness.launching import RUN, allow, finish, launch, start, write_script

from keras_dist.launch.output import Output

_PRINTS = """
import os, random, signal, sys, time, warnings
case, rank = sys.argv[1], int(os.environ["HOROVOD_RANK"])
stdout, stderr = sys.stdout.buffer, sys.stderr.buffer
if case == "line":
    sys.__dict__[sys.argv[2]].buffer.write(b"ab"[rank:rank + 1] * int(sys.argv[3]))
if case == "returns":
    stderr.write(b"\\r" * 20_000_000)
if case == "rubbish":
    stdout.write(random.Random(0).randbytes(20_000_000))
if case == "words":
    for _ in range(100):
        stdout.write("größer ".encode() * 3001)
    stdout.write(b"\\r\\nthe end\\r")
if case == "save":
    def save(*_):
        time.sleep(3)
        stdout.write(b"x" * 1_000_000 + b"\\nsaved\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("there", flush=True)
    time.sleep(1000)
if case == "warns":
    time.sleep(rank == 0)  # the first rank warns last
    warnings.warn("of all ranks")
    if rank:
        warnings.warn("of rank 1")
if case == "endless":
    while True:
        stdout.write(b"y" * 300_000)
"""


@pytest.fixture
def script(tmp_path):
    """Prints what its first argument says."""
    return write_script(tmp_path, _PRINTS)


def printed(*words):
    """What the launcher prints, in bytes, and the seconds that it takes."""
    begin = time.monotonic()
    how = {"text": False, "start_new_session": True}
    done = finish(start([*RUN, "-np", 1, *words], **how), 60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, time.monotonic() - begin


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_of_100_mb_passes_in_5_seconds(script, stream):
    """As the rank has printed it."""
    count = 100_000_000
    stdout, stderr, seconds = printed(script, "line", stream, count)
    shown = {"stdout": stdout, "stderr": stderr}[stream]
    assert shown.endswith(b"a" * count + b"\n")
    assert seconds < allow(5)


def test_any_bytes_pass_as_they_are(script):
    """Carriage returns alone, random bytes, and letters of two bytes in a long line."""
    rubbish = random.Random(0).randbytes(20_000_000)
    _, stderr, seconds = printed(script, "returns")
    assert stderr.endswith(b"\r" * 20_000_000 + b"\n")
    stdout, _, more = printed(script, "rubbish")
    assert stdout in (rubbish, rubbish + b"\n")
    assert seconds + more < allow(10)
    stdout, _, _ = printed(script, "words")
    assert stdout == "größer ".encode() * 300_100 + b"\r\nthe end\r\n"


def test_what_all_ranks_warn_stands_once(script):
    """With its line of code; a warning of another rank alone is shown as its own."""
    shown = launch([*RUN, "-np", 2, script, "warns"]).stderr.splitlines()
    line = next(n for n, text in enumerate(shown) if text.endswith("of all ranks"))
    assert shown[line].startswith(str(script)) and "warnings.warn" in shown[line + 1]
    assert sum("of all ranks" in text for text in shown) == 2  # and the code
    line = next(n for n, text in enumerate(shown) if text.endswith("of rank 1"))
    assert all(text.startswith("[1] ") for text in shown[line : line + 2])


def test_sigterm_is_answered_while_a_rank_prints(script):
    """Within a second, though its line has no end, which takes no memory either."""
    command = [*RUN, "-np", 2, script, "endless"]
    with start(command, text=False, stderr=None) as process:
        for _ in range(1000):
            assert os.read(process.stdout.fileno(), 1 << 16)
        assert psutil.Process(process.pid).memory_info().rss < 80 * 2**20
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while os.read(process.stdout.fileno(), 1 << 16):
            pass
        assert process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - begin < allow(1)


def test_a_closed_screen_is_no_error(script):
    """As in plain Python: `>&-` in a shell."""
    for closing in (">&-", "2>&-"):
        words = ["sh", "-c", f'exec "$@" {closing}', "sh", *RUN, "-np", 2, script]
        assert launch([*words, "line", "stdout", 9]).returncode == 0


def test_a_log_is_neither_a_link_nor_a_pipe(script, tmp_path):
    """Which another account may have made in a folder that it can write to."""
    secret, log = tmp_path / "secret", tmp_path / "logs" / "rank.1.log"
    secret.write_text("mine")
    log.parent.mkdir()
    log.symlink_to(secret)
    options = ["-np", 2, "--log-dir", log.parent, script, "line", "stdout", 9]
    for make in (lambda: None, lambda: os.mkfifo(log), lambda: log.write_text("+")):
        make()
        done = launch([*RUN, *options])
        if log.is_file() and not log.is_symlink():
            break
        assert done.returncode == 1
        assert f"{log}'" in done.stderr and "The log of a rank cannot" in done.stderr
        log.unlink()
    assert done.returncode == 0 and log.read_text() == "+" + "b" * 9
    assert secret.read_text() == "mine"


def test_ranks_may_save_when_the_launcher_receives_sigterm(script):
    """By which schedulers preempt a job; somebody still reads what they print, too."""
    process = start([*RUN, "-np", 2, script, "save"], stderr=None, text=False)
    for _ in range(2):
        assert process.stdout.readline().endswith(b"there\n")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert stdout.count(b"x") == 2_000_000
    assert set(stdout.splitlines()) >= {b"saved", b"[1] saved"}
    assert time.monotonic() - begin < allow(10)


@contextlib.contextmanager
def two_ranks(folder=None):
    """Yields a function by which one of two ranks writes to its stream 0 or 1."""
    output = Output(folder)
    pipes = {(rank, stream): os.pipe() for rank in range(2) for stream in range(2)}
    for rank in range(2):
        output.add(rank, *(os.fdopen(pipes[rank, k][0], "rb") for k in range(2)))

    def write(rank, stream, data):
        os.write(pipes[rank, stream][1], data)
        output.pass_on(0)

    yield write
    for _, writer in pipes.values():
        os.close(writer)
    output.close()


_MIXED = ["größer".encode(), b"", b"a\tb  ", b"the end"]


@pytest.mark.parametrize("size", [7, 100, 1 << 15])
def test_what_is_shown_does_not_depend_on_how_it_arrives(capfdbinary, tmp_path, size):
    """In chunks of any size; the file of a rank has every byte, too."""
    data = b"\n".join(_MIXED * 20)  # the last line without a newline
    with two_ranks(tmp_path) as write:
        for rank in range(2):
            for begin in range(0, len(data), size):
                write(rank, 1, data[begin : begin + size])
    assert [(tmp_path / f"rank.{n}.log").read_bytes() for n in (0, 1)] == [data] * 2
    assert capfdbinary.readouterr() == (b"", data + b"\n")


def test_a_progress_bar_is_shown_as_it_grows(capfdbinary):
    """Each state with the rank before it, as soon as the next one begins."""
    written = [(b"\r 1/3", b"\r"), (b"\b\b\b\b\r 2/3", b"[1]  1/3\b\b\b\b\r")]
    written += [(b"\r 3/3", b"[1]  2/3\r"), (b" done\r", b"")]
    written += [(b"\nnext\r\n", b"[1]  3/3 done\r\n[1] next\r\n")]
    with two_ranks() as write:
        for data, shown in written:
            write(1, 0, data)
            assert capfdbinary.readouterr().out == shown


def test_a_line_of_another_rank_is_not_put_over_a_progress_bar(capfdbinary):
    """It begins a new line."""
    with two_ranks() as write:
        write(0, 0, b"a long bar\ra longer bar")
        write(1, 0, b"line\nline\n")
        write(0, 0, b"\n")
    assert (
        capfdbinary.readouterr().out
        == b"a long bar\r\n[1] line\n[1] line\na longer bar\n"
    )


def test_what_tensorflow_writes_as_it_is_imported_is_left_out(capfdbinary):
    """Information that it writes at any level; an error beside it is shown."""
    routine = b"I0000 00:00:1795808367.005865    4588 port.cc:153] oneDNN is on.\n"
    head = b"WARNING: All log messages before absl::InitializeLog() is called are\n"
    error = b"E0000 00:00:1795808369.811250    4588 cuda_platform.cc:52] no driver\n"
    with two_ranks() as write:
        for rank in range(2):
            write(rank, 1, head + routine + error + b"I0000 am a user\n")
    expected = error + b"I0000 am a user\n[1] " + error + b"[1] I0000 am a user\n"
    assert capfdbinary.readouterr() == (b"", expected)
