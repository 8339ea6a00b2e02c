"""`keras-dist run`: the first failure is the one to read, and nothing stays behind."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from harness.launching import (
    MISBEHAVES,
    PYTHONPATH,
    RUN,
    allow,
    finish,
    free_port,
    launch,
    prefix,
    run,
    start,
    until,
    write_script,
)

import keras_dist
from keras_dist.launch.hosts import parse_endpoint, parse_hosts, read_hostfile
from keras_dist.launch.monitor import watchdog

# What the first failure is: the end of its traceback or a line, and the exit code.
_CASES = {
    "raise": ("KeyError: 'tea'", 1),
    "exit": ("It ended with exit code 3", 3),
    "kill": ("was ended by SIGKILL", 128 + signal.SIGKILL),
    "generator": ("KeyError: 'tea'", 1),
    "memory": ("MemoryError", 1),
}


_SELDOM = "exit", "generator", "memory"


@pytest.mark.parametrize(
    ("case", "ranks", "transport"),
    [
        ("raise", 2, "horovod"),
        ("kill", 2, "horovod"),
        ("kill", 2, "tensorflow"),
        *(
            pytest.param(case, 2, transport, marks=pytest.mark.long)
            for case in ("raise", *_SELDOM)
            for transport in ("horovod", "tensorflow")[case == "raise" :]
        ),
        *(
            pytest.param(case, 3, transport, marks=pytest.mark.long)
            for case in ("raise", "kill")
            for transport in ("horovod", "tensorflow")
        ),
    ],
)
def test_the_first_failure_is_read_first_and_nothing_is_left(
    left_behind, case, ranks, transport
):
    """Its own traceback, a line for each other rank, its exit code, within 10 s."""
    failing = {"exit": 0, "kill": ranks - 1}.get(case, 1)
    where = "batch-20" if case == "generator" else "step-7"
    env = {"MISBEHAVES": f"{case} {where} {failing}", "KERAS_DIST_TRANSPORT": transport}
    done = run("-np", ranks, MISBEHAVES, **env)
    ended = time.time()
    begin, code = _CASES[case]
    report = done.stderr[done.stderr.index("keras-dist: rank") :].splitlines()
    assert done.returncode == code, done.stderr
    assert report[0].startswith(f"keras-dist: rank {failing} failed first, in "), report
    assert any(begin in line for line in report), report
    assert f"\n{prefix(failing)}fails at" in f"\n{done.stdout}"
    others = [line for line in report if re.match(r"Rank \d was ", line)]
    assert len(others) == ranks - 1, report
    if case != "generator":
        assert "step 7 of epoch 1" in report[0]
        assert all("step 7 of epoch 1" in line for line in others), others
    assert ended - float(done.stdout.split("fails at ")[1].split()[0]) < 10


_HOWS = "raise", "exit", "kill", "memory", "leave", "sleep"


def _draw_fault(seed):
    """Return how, where and which of 3 ranks fails, at random."""
    draw = random.Random(seed)
    step = draw.randrange(2, 17)  # an epoch has 17
    places = f"step-{step}", f"callback-{step}", f"batch-{step}", "epoch-3"
    return draw.choice(_HOWS), draw.choice(places), draw.randrange(3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("transport", ["horovod", "tensorflow"])
def test_a_random_fault_ends_all_and_names_its_cause(left_behind, transport, seed):
    """One that leaves or sleeps shows as soon as the others wait for it."""
    how, where, rank = _draw_fault(seed)
    env = {"MISBEHAVES": f"{how} {where} {rank}", "KERAS_DIST_TRANSPORT": transport}
    begun = time.monotonic()
    done = run("-np", 3, MISBEHAVES, KERAS_DIST_STALL_SECONDS="10", **env)
    is_in_data = where.startswith("batch")  # where TensorFlow makes an error of it
    causes = {
        "leave": ("SystemExit" if is_in_data else "ended with no error", 1),
        "sleep": ("in sleep_for_ever", watchdog.EXIT_CODE),
    }
    cause, code = (_CASES | causes)[how]
    report = done.stderr[done.stderr.index("keras-dist: rank") :]
    assert report.startswith(f"keras-dist: rank {rank} failed first"), report
    assert cause in report and done.returncode == code, (done.returncode, report)
    assert time.monotonic() - begun < 120


_SLEEPS = """
import os, subprocess, time
subprocess.Popen(["setsid", "sleep", "1000"])
print("there", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_takes_everything_with_it(tmp_path, left_behind, number):
    """Ctrl-C, SIGTERM, and SIGKILL, which the launcher cannot see."""
    process = start([*RUN, "-np", 2, write_script(tmp_path, _SLEEPS)], stderr=None)
    for _ in range(2):
        assert process.stdout.readline().endswith("there\n")
    process.send_signal(number)
    process.wait(timeout=allow(10))
    process.stdout.close()
    is_killed = number == signal.SIGKILL
    assert process.returncode == (-number if is_killed else 128 + number)
    if is_killed:
        until(lambda: not left_behind(), "the end of the ranks")


# Stands for PID 1 of a container: it gets all orphans, and reaps none.
_INIT = """
import ctypes, subprocess, sys, time
import psutil
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
job = subprocess.Popen(sys.argv[1:])
print(job.pid, flush=True)
code = job.wait()
sys.stdin.readline()
left, end = ["?"], time.monotonic() + 5
while set(left) - {"zombie"} and time.monotonic() < end:
    try:
        left = [each.status() for each in psutil.Process().children(recursive=True)]
    except psutil.NoSuchProcess:  # it has just ended
        left = ["?"]
print(code, *left)
"""

# Each rank leaves a daemon without an environment, and a process that ends as one.
_LEAVES = """
import signal, subprocess, sys, time
daemon = "trap '' HUP TERM INT; echo $$; while :; do sleep 1; done"
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", daemon])
subprocess.run("sleep 0.1 &", shell=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1000 if sys.argv[1].isdecimal() else 1)
sys.exit({"ends": 0}.get(sys.argv[1], 3))
"""


_HOW = ["ends", "fails", "1 parents", signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("how", _HOW)
def test_daemons_without_environment_end_with_their_ranks(tmp_path, how):
    """No zombie is left either, where PID 1 does not reap, as in a container."""
    name = how.split()[0] if isinstance(how, str) else str(int(how))
    init = write_script(tmp_path, _INIT, "init.py")
    words = [
        sys.executable,
        init,
        *RUN,
        "-np",
        2,
        write_script(tmp_path, _LEAVES),
        name,
    ]
    env = {"PYTHONPATH": PYTHONPATH, "KERAS_DIST_SAVE_SECONDS": "1"}
    process = start(words, env=env, stdin=subprocess.PIPE)
    job = int(process.stdout.readline())
    daemons = [process.stdout.readline().split()[-1] for _ in range(2)]
    daemons = [psutil.Process(int(pid)) for pid in daemons]
    if how == "1 parents":  # of the ranks, by `pkill -9 -f script.py`
        for parent in psutil.Process(job).children():
            parent.kill()
    elif name != how:
        os.kill(job, how)
    until(lambda: not any(each.is_running() for each in daemons), "the daemons' end")
    stdout, stderr = process.communicate("\n", timeout=20)
    code, *left = stdout.split()
    expected = dict(zip(_HOW, [0, 3, 137, 143, -9], strict=True))
    assert int(code) == expected[how], stderr
    # Nobody waits for the children of a launcher that was killed.
    assert left == [] if how != signal.SIGKILL else set(left) <= {"zombie"}


_HANDLES = """
import atexit, os, sys, time
rank, case = int(os.environ["HOROVOD_RANK"]), sys.argv[1]

def wait(text="there", seconds=1000):
    print(text, flush=True)
    time.sleep(seconds)

if case == "init":
    import keras_dist
    if rank == 1:
        wait()
    keras_dist.init()
atexit.register(print, "at exit")
try:
    wait()
except KeyboardInterrupt:
    if case == "none":
        raise
    wait("saves", seconds=3 if case == "saves" else 1000)
    print("saved")
"""


@pytest.mark.parametrize("case", ["none", "saves", "twice", "init"])
def test_ctrl_c_is_a_keyboard_interrupt_on_all_ranks(tmp_path, left_behind, case):
    """Which may save; no rank prints an error; a second Ctrl-C ends them at once.

    Nor is one that has left waited for where Horovod starts.
    """
    words = ["-np", 2, "--log-dir", tmp_path] if case == "none" else ["-np", 2]
    process = start([*RUN, *words, write_script(tmp_path, _HANDLES), case])
    prefixes = {"none": [""], "init": ["[1] "]}.get(case, ["", "[1] "])

    def read(text):
        lines = {process.stdout.readline() for _ in prefixes}
        assert lines == {f"{prefix}{text}\n" for prefix in prefixes}

    read("there")
    time.sleep(8 if case == "init" else 0)  # the other one is in `init`
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    if case in ("saves", "twice"):
        read("saves")
    if case == "twice":
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert stderr.splitlines()[-1] == "keras-dist: ended by SIGINT."
    assert "Traceback" not in stderr and "failed" not in stderr
    assert stdout.count("saved") == 2 * (case == "saves")
    assert stdout.count("at exit") == {"none": 1, "saves": 2}.get(case, 0)
    assert time.monotonic() - begin < allow(10)


_SAVES = """
import sys, time
import keras, numpy as np
import keras_dist

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            print("there", flush=True)
        # The ranks get the signal at different places, one of them in a collective.
        time.sleep(1000 if batch == 2 and keras_dist.rank() == 1 else 0.1)

resume = sys.argv[2] if sys.argv[2:] else None
if resume:
    Slow.on_train_batch_end = lambda self, batch, logs=None: (
        print("there", flush=True) if batch == 2 else time.sleep(0.1)
    )
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=bool(resume))
try:
    keras_dist.dist_fit(
        model, np.ones((640, 2)), np.ones(640), batch_size=4, epochs=100, verbose=0,
        callbacks=[Slow()], resume=resume,
    )
except KeyboardInterrupt:
    model.save(sys.argv[1])
    print("saved", int(model.optimizer.iterations))
"""


@pytest.mark.parametrize("resumes", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_script_saves_its_model_on_ctrl_c(tmp_path, left_behind, resumes):
    """Wherever the ranks are; with `resume`, behind a checkpoint of the same step."""
    path, folder = tmp_path / "interrupted.keras", tmp_path / "checkpoints"
    words = [write_script(tmp_path, _SAVES), path, *[folder] * resumes]
    process = start([*RUN, "-np", 2, *words])
    assert "fit runs on 2 ranks" in process.stdout.readline()
    for _ in range(2):
        assert process.stdout.readline().endswith("there\n")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert stdout.count("saved") == 2 and path.exists(), stdout + stderr
    assert "Traceback" not in stderr
    if resumes:
        assert list(folder.glob("*.keras_dist"))


_MAIN = """
\"\"\"What Python sets.\"\"\"
import sys
print(sorted((k, repr(v).split(" at 0x")[0]) for k, v in globals().items()))
print(sys._getframe().f_code.co_filename, sys.path[0], sys.argv, flush=True)
"""


def test_a_script_sees_what_plain_python_sets(tmp_path):
    """`__file__` and the rest, from a folder that it leaves or not."""
    write_script(tmp_path, _MAIN)
    for path in ("script.py", "./script.py", f"../{tmp_path.name}/script.py"):
        options = {"cwd": tmp_path, "env": {"PYTHONPATH": PYTHONPATH}}
        plain = finish(start([sys.executable, path, "word"], **options))
        ours = finish(start([*RUN, "-np", 1, path, "word"], **options))
        assert ours.stdout == plain.stdout and f"{tmp_path}/" in plain.stdout


def test_a_rank_without_the_variables_of_the_job_ends_with_it():
    """As in a container; although it ignores SIGTERM."""
    shell = "trap '' TERM; echo $$; while :; do sleep 1; done"
    process = start([*RUN, "-np", 1, "env", "-i", "sh", "-c", shell], stderr=None)
    try:
        rank = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=allow(10)) == 128 + signal.SIGINT
        found = [p for p in psutil.process_iter() if os.getsid(p.pid) == rank]
        assert {each.status() for each in found} <= {psutil.STATUS_ZOMBIE}
    finally:
        process.kill()
        process.stdout.close()


def test_a_job_outlives_its_terminal_where_the_user_says_so(tmp_path):
    """By `nohup`, which lets it ignore SIGHUP."""
    code = "import time; print('there'); time.sleep(1); print('done')"
    process = start(
        ["nohup", *RUN, "-np", 1, write_script(tmp_path, code)], stderr=None
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=20) == ("done\n", None)
    assert process.returncode == 0


def test_the_launcher_imports_no_tensorflow():
    """With options of Python, too."""
    words = ["-B", "-X", "importtime", "-m", "keras_dist", "run", "--help"]
    done = launch([sys.executable, *words])
    assert "argparse" in done.stderr and "tensorflow" not in done.stderr


_WRAPPED = """
import os, subprocess, sys
if sys.argv[1:]:  # as `conda run`, whose children inherit no descriptors
    sys.exit(subprocess.run([sys.executable, __file__]).returncode)
from keras_dist.launch.monitor import record
record.here.enter("step", epoch=1, step=6)
os._exit(3)
"""


def test_the_end_of_a_rank_is_known_behind_a_program_and_an_ignored_sigchld(tmp_path):
    """Its place and exit code, where who starts the launcher ignores that signal."""
    words = ["-np", 1, "sh", "-c", f"exec {sys.executable} $0 again"]
    command = [*RUN, *words, write_script(tmp_path, _WRAPPED)]
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignores += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = launch([sys.executable, "-c", ignores, *command[1:]])
    assert done.returncode == 3, done.stderr
    assert "rank 0 failed first, in step 7 of epoch 2." in done.stderr


# What Python, or this package, ignores; whoever runs the tests may ignore others.
_CHANGED = sum(
    1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1)
)
_IGNORES = 'grep SigIgn /proc/self/status; printf "%s\\n" "$PYTHONPATH"'


def test_what_a_rank_starts_ignores_no_signal(tmp_path):
    """Neither does a program that is one but for SIGUSR1, which SLURM sends to all."""
    code = f"import subprocess; subprocess.run(['sh', '-c', {_IGNORES!r}])"
    for words in ["sh", "-c", _IGNORES], [write_script(tmp_path, code)]:
        for variables in {}, {"SLURM_JOB_ID": "7"}:
            done = run("-np", 1, *words, **variables)
            found = int(done.stdout.split()[1], 16) & _CHANGED
            is_program = words[0] == "sh"
            expected = 1 << (signal.SIGUSR1 - 1) if is_program and variables else 0
            assert found == expected, (words, variables, done.stdout)


_COUNTS = """
import os, sys
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
print("rank", rank, "start", start, sys.argv[1:], flush=True)
sys.exit(5 if rank == "1" and int(start) < int(sys.argv[1]) else 0)
"""


def test_a_failed_job_is_started_again(tmp_path):
    """At most `--restarts` times; the exit code is that of the last start."""
    script, logs = write_script(tmp_path, _COUNTS), tmp_path / "logs"
    done = run("-np", 2, "--restarts", 2, "--log-dir", logs, script, 2, "--flag")
    assert done.returncode == 0, done.stderr
    expected = [f"rank 1 start {n} ['2', '--flag']" for n in range(3)]
    assert (logs / "rank.1.log").read_text().split("\n")[:-1] == expected
    assert "rank 1" not in done.stdout and "rank 0 start 2" in done.stdout
    assert run("-np", 2, "--restarts", 1, script, 2).returncode == 5


def test_ranks_that_were_asked_to_end_are_not_started_again(tmp_path):
    """They have saved, and the scheduler that has asked starts the job again."""
    words = ["-np", 2, "--restarts", 1]
    code = "class SavedExit(SystemExit): pass\nraise SavedExit(75)"
    done = run(*words, write_script(tmp_path, code))
    assert done.returncode == 75
    assert "asked to end by SIGTERM" in done.stderr and "start 2" not in done.stderr
    done = run(*words, write_script(tmp_path, "raise SystemExit(75)"))  # by itself
    assert done.returncode == 75 and "start 2 of at most 2" in done.stderr


_TWO = ["--nnodes", 2, "--node-rank", 0, "--rdzv"]
_NEEDS = "needs `--nnodes`, `--node-rank` and `--rdzv`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "this"], "At least one rank is needed, by -np N"),
        (["-np", 2], "script to start is needed"),
        (["-np", 2, "nothing.py"], "no such script"),
        (["-np", 2, "--"], "script to start is needed"),
        (["-np", 2, "--", "nothing.py"], "Received: nothing.py"),
        (["-np", 0, "-m", "this"], "At least one rank"),
        (["-np", 3, "-H", "localhost:2", "-m", "this"], "fewer slots"),
        (["-np", 2, "--stall-limit", -1, "-m", "this"], "number of seconds"),
        (["--hostfile", "Makefile", "-m", "this"], "hosts file must be a name"),
        # What cannot meet.
        (["--nnodes", 2, "-m", "this"], _NEEDS),
        (["--rdzv", "a:1", "-m", "this"], _NEEDS),
        (["--nnodes", 2, "--rdzv", "a:1", "-m", "this"], _NEEDS),
        ([*_TWO, "a:1", "-H", "a:1", "-m", "this"], "and no `-H`"),
        ([*_TWO, "a:b", "-m", "this"], "its name or address, and a port"),
        ([*_TWO, "a:1", "-m", "this"], "needs a secret of at least 16"),
        ([*_TWO, "localhost:1", "-m", "this"], "needs a secret of at least 16"),
        ([*_TWO, "localhost:1", "--nnodes", 0, "-m", "this"], "rank 0 of 0"),
        ([*_TWO, "localhost:1", "--node-rank", 2, "-m", "this"], "--nnodes, --node-"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(words, message):
    """Before any rank is started, and before anything listens."""
    secret = {"KERAS_DIST_SECRET": "short"} if "--rdzv" in words else {}
    done = run(*words, **secret)
    assert done.returncode == 1
    assert message in done.stderr and "Received" in done.stderr


_ON_HOSTS = """
import os
import keras_dist

rank = keras_dist.rank()
print(keras_dist.gather((rank, keras_dist.local_rank(), keras_dist.local_size())))
if rank == 1:
    raise KeyError("tea")
keras_dist.gather("never")
"""


def stand_in(folder, text):
    """The variable PATH with a stand-in for ssh, which gets `--`, host and command."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n{text}')
    ssh.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_ranks_of_several_hosts_are_one_job(tmp_path, left_behind):
    """Two names of this machine, and a stand-in for ssh that runs the command here."""
    path = stand_in(tmp_path, 'echo "to $2" >&2\nexec sh -c "$3"\n')
    hosts = ["-H", "a:1,b:1", "--rdzv", f"127.0.0.1:{free_port()}"]
    done = run(*hosts, write_script(tmp_path, _ON_HOSTS), PATH=path)
    assert done.returncode == 1, done.stderr
    assert "to a\n" in done.stderr and "to b\n" in done.stderr
    expected = [(0, 0, 1), (1, 0, 1)]
    for rank in range(2):
        assert f"{prefix(rank)}{expected}" in done.stdout.splitlines()
    report = done.stderr[done.stderr.index("keras-dist: rank") :]
    assert report.startswith("keras-dist: rank 1 on b failed first")
    assert "KeyError: 'tea'" in report
    assert "Rank 0 on a was" in report


_SAVES_AND_ENDS = """
import signal, time
class SavedExit(SystemExit):
    pass
def save(*_):
    raise SavedExit(75)
signal.signal(signal.SIGTERM, save)
print("there", flush=True)
time.sleep(1000)
"""


def test_sigusr1_of_slurm_asks_the_ranks_of_all_hosts_to_save(tmp_path, left_behind):
    """Where the command with `-H` is in a batch script."""
    path = stand_in(tmp_path, 'exec sh -c "$3"\n')
    hosts = ["-H", "a:1,b:1", "--rdzv", f"127.0.0.1:{free_port()}"]
    words = [*RUN, *hosts, write_script(tmp_path, _SAVES_AND_ENDS)]
    env = {"PYTHONPATH": PYTHONPATH, "PATH": path, "SLURM_JOB_ID": "7"}
    process = start(words, env=env)
    for _ in range(2):
        assert process.stdout.readline().endswith("there\n")
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "ended by SIGUSR1; the ranks ended together" in stderr


def test_a_host_that_cannot_be_reached_is_named(tmp_path, left_behind):
    """And the ranks of the others end."""
    hosts = ["-H", "localhost:1,b:1", "--rdzv", f"127.0.0.1:{free_port()}"]
    path = stand_in(tmp_path, "echo no way >&2\nexit 255\n")
    done = run(*hosts, write_script(tmp_path, _SLEEPS), PATH=path)
    assert done.returncode == 255
    assert done.stderr.startswith("no way\nkeras-dist: the command on b ended")
    assert "connection to it was lost: exit code 255." in done.stderr


_FORKS = """
import os, sys, time
import keras_dist
from keras_dist.launch.monitor import record

def ended(end):
    pid = os.fork()
    if pid == 0:
        record.here.enter("end", epoch=98)
        end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail():
    raise LookupError("of the child")

keras_dist.init()
ends = fail, sys.exit, lambda: sys.exit(3)
print("children", [ended(end) for end in ends], flush=True)
time.sleep(4)
print("sum", keras_dist.sum(1), flush=True)
if keras_dist.rank() == 1:
    raise KeyError("of the rank")
"""


def test_what_a_forked_process_does_is_not_the_ranks_doing(tmp_path):
    """Its error, its exit and its place in a fit; each ends, as in plain Python."""
    done = run("-np", 2, write_script(tmp_path, _FORKS))
    for rank in range(2):
        assert f"{prefix(rank)}children [1, 0, 3]" in done.stdout.splitlines()
        assert f"{prefix(rank)}sum 2" in done.stdout.splitlines()
        assert f"{prefix(rank)}LookupError: of the child" in done.stderr.splitlines()
    assert "rank_process.py" not in done.stderr
    report = done.stderr[done.stderr.index("keras-dist: rank") :]
    assert done.returncode == 1
    assert "rank 1 failed first, in user code, outside of a fit" in report
    assert "KeyError: 'of the rank'" in report


_NO_HOSTS = ["-oProxyCommand=touch-it", "a@-oProxyCommand=it", "-a@b", "a;b", "$(a)"]
_NO_HOSTS += ["a b", "a@b@c", "a/b", "\x1b[2J", "@a", "a'b"]


def test_what_no_host_is_called_is_an_error_wherever_hosts_are_named(tmp_path):
    """In `-H`, a hosts file and `--rdzv`: before ssh is called."""
    called, file = tmp_path / "called", tmp_path / "hosts"
    path = stand_in(tmp_path, f'echo "$@" >> {called}\n')
    for name in _NO_HOSTS:
        file.write_text(f"a:1\n{name}:1\n")
        with pytest.raises(ValueError, match="The name of a host must be") as found:
            parse_hosts(f"a:1,{name}:1", None)
        assert f"Received: {name!r} in -H a:1," in str(found.value)
        with pytest.raises(ValueError, match="The name of a host must be"):
            parse_endpoint(f"{name}:29400")
        if " " not in name:
            file.write_text(f"a slots=1\n{name} slots=1\n")
            with pytest.raises(ValueError, match="The name of a host must be") as found:
                read_hostfile(file)
            assert f"Received: {name!r} in line 2 of {file}" in str(found.value)
    named = "me.too@node-1.cluster:2,10.0.0.1:1,größe:1,DOMAIN\\me@fe80::1%eth0:1"
    assert len(parse_hosts(named, None)) == 4
    file.write_text("a slots=1\na slots=1\n")
    done = run("--hostfile", file, "-m", "this", PATH=path)
    assert f"each name once, as in a:2,b:2. Received: --hostfile {file}" in done.stderr
    file.write_text("-oProxyCommand=touch-it slots=1\n")
    for words in ["-H", "-oProxyCommand=touch-it:1"], ["--hostfile", file]:
        done = run(*words, "-m", "this", PATH=path)
        assert done.returncode in (1, 2), done.stderr
        assert "-oProxyCommand=touch-it" in done.stderr or words[0] == "-H"
    assert not called.exists()


def test_many_ranks_find_the_store_at_once(store):
    """Even while it cannot answer; Horovod's own has room for five of them."""
    store.shutdown()
    # Nobody takes them: one that finds no room is never connected.
    ranks = [
        socket.create_connection(("127.0.0.1", store.port), 10) for _ in range(300)
    ]
    for rank in ranks:
        rank.close()


def test_a_function_runs_on_ranks_and_returns_their_values(capfd):
    """Pickled by value; all listen on the loopback interface; an error is raised."""

    def rank_and_sum(of, *, fail):
        if fail:
            raise KeyError("tea")
        total = keras_dist.sum(of)
        processes = psutil.Process(), psutil.Process().parents()[1]  # the launcher
        found = [c for each in processes for c in each.net_connections("inet")]
        listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
        return keras_dist.rank(), total, listening

    # Of a module that the ranks cannot import, like a function in a notebook.
    rank_and_sum.__module__ = "__main__"
    done = keras_dist.run(rank_and_sum, [2], {"fail": False}, np=2)
    assert done == [(0, 4, {"127.0.0.1"}), (1, 4, {"127.0.0.1"})]
    with pytest.raises(RuntimeError, match="printed above. Received: exit code 1"):
        keras_dist.run(rank_and_sum, [2], {"fail": True}, np=1)
    errors = capfd.readouterr().err
    assert "keras-dist: rank 0 failed first" in errors
    assert "RuntimeWarning" not in errors


def test_a_rank_of_a_function_passes_no_paths_on(tmp_path, monkeypatch):
    """To another version of Python, say; it finds what this process does.

    Neither does it leave a file, where a notebook is killed.
    """
    write_script(tmp_path, "word = 'tea'", "of_this_test.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "empty"))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def look():
        import subprocess  # noqa: PLC0415

        import of_this_test  # noqa: PLC0415

        shown = subprocess.run(["env"], capture_output=True, text=True).stdout
        lines = [line for line in shown.split() if "PATH" in line]
        return of_this_test.word, lines, os.listdir(os.environ["TMPDIR"])

    look.__module__ = "__main__"
    [(word, lines, files)] = keras_dist.run(look, np=1)
    assert word == "tea" and f"PYTHONPATH={PYTHONPATH}" in lines and files == []
    assert not any(str(tmp_path) in line for line in lines)
