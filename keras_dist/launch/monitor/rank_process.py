"""Run the user's script in a rank, and write a report for the launcher if it fails.

`keras-dist run` starts this file by its path. It forks the rank, which runs the user's
script, and ends what the rank leaves behind. It imports nothing but the standard
library, so that it sees every error of the script, also one of the first import.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
import zlib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

# The launcher sets this variable to the path of the rank's record, a file without a
# name: where the rank is (`record.py`), and behind these bytes why it fails. An error
# is a line of JSON, of which the first counts; after a crash there are Python's stacks.
RECORD, POSITION_BYTES = "KERAS_DIST_RECORD", 152

# If this variable is set, a rank that has written a report does not print its error:
# the launcher prints the first error, and one line for each other rank.
QUIET = "KERAS_DIST_QUIET"

# If this variable is set, keras_dist is imported before the script's first line, and
# distributes what the script trains.
DISTRIBUTE = "KERAS_DIST"

# The most threads with which a rank of `keras-dist run` computes: as many as there are
# for a rank on each host. Norms depend on their number, and so do the ranks' weights.
THREADS = "KERAS_DIST_THREADS"

# What a rank has in `sys.path`, if `keras_dist.run` has started the job; PYTHONPATH
# would pass it on to other versions of Python, too.
PATHS = "KERAS_DIST_PATHS"

# `keras-dist run` draws a seed for each job; other launchers give all ranks an id.
SEED = "KERAS_DIST_SEED"
JOB_IDS = (
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "SLURM_JOB_ID",
)

# The errors with which `checkpoint/saver.py` ends a rank that was asked to end.
_SAVED = "SavedExit", "SavedInterrupt"

# What collectives say after another rank has ended: Horovod's, and TensorFlow's.
SHUT_DOWN = "Collective ops is aborted by"
ENDED = ("Horovod has been shut down", SHUT_DOWN, "/tensorflow.WorkerService/")

# Such an error of a collective has its cause on another rank; and who raises them.
_FROM_ANOTHER_RANK = (
    *ENDED,
    "Another rank has ended while this one waited",
    "Connection closed by peer",
    "Connection reset by peer",
    "cannot be read, for a sum: it has ended",
)
_COLLECTIVES = ("tensorflow", "horovod", "keras_dist")
_RANK_ERROR = ("keras_dist.errors", "RankError")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Seconds in which all that a rank leaves has to end by SIGKILL.
_KILL_SECONDS = 3.0

# The path of this rank's record; `None` where there is none.
record_path = os.environ.get(RECORD)
# Never a file with a name: in a container another one may have this path.
if not (
    record_path and os.path.exists(record_path) and not os.stat(record_path).st_nlink
):
    record_path = None


def write_report(summary: str, text: str, code: int, **flags: bool) -> None:
    """Write the report of this rank: why it fails; see `launch.failures.RankEnd`.

    Only the first one counts; later errors are not the cause.
    """
    if record_path is None:
        return
    report = {"time": time.time(), "code": code, "summary": summary, "text": text}
    line = f"{json.dumps(report | flags)}\n".encode()
    with contextlib.suppress(OSError), open(record_path, "ab", buffering=0) as file:
        file.write(line)  # at once: two threads may fail


def is_secondary(error: BaseException) -> bool:
    """Return True if an error has its cause on another rank, by what raised it.

    An error of the user's code may have the same text, also inside of TensorFlow's.
    """
    classes = [(each.__module__, each.__name__) for each in type(error).__mro__]
    modules, text = [type(error).__module__], str(error)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        modules[1:] = [frame.f_globals.get("__name__", "")]  # of the last one
    is_collective = any(name.split(".")[0] in _COLLECTIVES for name in modules)
    is_collective &= "Traceback (most recent call last)" not in text
    return (
        _RANK_ERROR in classes
        or (is_collective and any(each in text for each in _FROM_ANOTHER_RANK))
        or (error.__cause__ is not None and is_secondary(error.__cause__))
    )


def _report_error(error: BaseException) -> None:
    kind, message = type(error).__name__, str(error)
    if isinstance(error, FileExistsError) and os.environ.get("HOROVOD_SIZE") != "1":
        error.add_note(
            "Each rank runs the script, and another one may have made the file: pass "
            "exist_ok=True, or see keras_dist.first_rank."
        )
    lines = traceback.format_exception(type(error), error, _own(error.__traceback__))
    code = 1
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code & 0xFF or 1  # as the kernel cuts it, but never a success
    write_report(
        f"{kind}: {message}".strip(": ").splitlines()[0],
        "".join(lines),
        code,
        is_secondary=is_secondary(error),
        is_saved=kind in _SAVED,
    )


def _own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the first entries, which are of this file and `runpy`."""
    foreign = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in foreign:
        trace = trace.tb_next
    return trace


def _print(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    has_report = record_path and os.path.getsize(record_path) > POSITION_BYTES
    is_ctrl_c = issubclass(kind, KeyboardInterrupt)  # with `--log-dir`, too
    if not (has_report and (is_ctrl_c or os.environ.get(QUIET))):
        error.__traceback__ = _own(trace)  # which the hook prints, not its argument
        sys.__excepthook__(kind, error, error.__traceback__)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call of prctl
        os._exit(1)


def adopt_orphans() -> None:
    """Let this process be the parent of whatever its children leave, daemons too."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill and reap all children of this process, and all that they leave to it."""
    end = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ChildProcessError):  # all have ended
        while time.monotonic() < end:
            for child in Path("/proc/thread-self/children").read_text().split():
                with contextlib.suppress(PermissionError):  # of another account: `sudo`
                    os.kill(int(child), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _fork_rank(launcher: int) -> None:
    """Fork the rank, and return there; this process ends all that the rank leaves.

    It ends with the rank's exit code, or 128 + the number of the signal that ended it.
    It passes SIGTERM on to the rank, and SIGINT to its session; at SIGHUP, and at the
    launcher's end, it kills all.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    end_with(launcher, signal.SIGHUP)
    adopt_orphans()
    parent, rank = os.getpid(), os.fork()
    if rank == 0:
        os.setsid()
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return

    def pass_on(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            send = os.killpg if number == signal.SIGINT else os.kill  # as a terminal
            send(rank, signal.SIGKILL if number == signal.SIGHUP else number)

    passed_on = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    ended = status = 0
    while ended != rank:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    end_children()
    os._exit(code if code >= 0 else 128 - code)


def seed_generators(job: str = "") -> None:
    """Seed `random` and `numpy.random` alike on all ranks, before a script first draws.

    A script that has seeded NumPy's before is left alone.

    Args:
        job: A text that all ranks of the job have, for launchers without an id for it.
    """
    import numpy as np  # noqa: PLC0415 - the launcher and `install-horovod` have none

    found = next(filter(None, map(os.environ.get, JOB_IDS)), job)
    given = os.environ.get(SEED) or (found and str(zlib.crc32(found.encode())))
    if given and not given.strip().removeprefix("-").isdecimal():
        raise ValueError(f"{SEED} must be a whole number. Received: {SEED}={given}")
    # A generator that was seeded by a number has no seed sequence.
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if given and generator.seed_seq is not None:
        random.seed(int(given))
        np.random.seed(int(given) % 2**32)


def _leave_rank() -> None:
    """In a process that the rank has forked: what happens here is not its failure."""
    global record_path
    record_path = None
    faulthandler.disable()


def main(arguments: list[str]) -> None:
    """Run the user's command in a process of its own.

    Args:
        arguments: Process id of the launcher, kind of the command ("script", "module"
            or "program"), and the words of the command.
    """
    launcher, kind, *command = arguments
    _fork_rank(int(launcher))
    # SLURM signals all processes, also the launcher. A program ignores that signal if
    # this process does; what a script starts does not.
    is_program, nothing = kind == "program", lambda *_: None
    if "SLURM_JOB_ID" in os.environ:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if is_program else nothing)
    if is_program:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    if paths := os.environ.pop(PATHS, None):
        sys.path[1:] = paths.split(os.pathsep)
    if record_path:
        faulthandler.enable(open(record_path, "a"))  # noqa: SIM115
    sys.excepthook = _print
    os.register_at_fork(after_in_child=_leave_rank)
    sys.argv = command
    is_module = kind == "module"
    try:
        seed_generators()
        folder = Path(command[0]).resolve().parent
        sys.path[0] = os.getcwd() if is_module else str(folder)
        if os.environ.get(DISTRIBUTE):
            os.environ.setdefault("KERAS_BACKEND", "tensorflow")
            importlib.import_module("keras_dist")
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:  # as `python PATH` does, without the frames of `runpy`
            main = types.ModuleType("__main__")
            path = os.path.join(os.getcwd(), command[0])
            loader = SourceFileLoader("__main__", path)
            main.__dict__.update(__file__=path, __cached__=None, __annotations__={})
            main.__dict__.update(__loader__=loader, __builtins__=__builtins__)
            sys.modules["__main__"] = main
            code = loader.source_to_code(Path(path).read_bytes(), path)
            exec(code, main.__dict__)
    except BaseException as error:  # KeyboardInterrupt ends the rank, too
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _report_error(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
