"""Ranks without a launcher of ours: one process imports TensorFlow, and forks them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.launching import ROOT, free_port

# Importing TensorFlow takes seconds: one process does it, and forks into all ranks.
# They have not what the package does at its import in a rank: its device, and saving.
_FORKS = """
import faulthandler, json, os, signal, sys
import keras, numpy, keras_dist
from keras_dist import comm  # and with it all of TensorFlow that ranks need
rank = None
while rank is None and (line := sys.stdin.readline()):
    pids = []
    for each in json.loads(line):
        pids.append(os.fork())
        if pids[-1] == 0:
            rank = each
            break
    else:
        print(json.dumps(pids), flush=True)
        for pid in pids:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
if rank is not None:
    file = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()  # a rank that hangs says where, by SIGABRT
    os.environ.update(rank["env"])
    path = rank["output"] + ".py"
    with open(path, "w") as script:
        script.write(rank["script"])
    exec(compile(rank["script"], path, "exec"))
"""


@pytest.fixture(scope="session")
def forks():
    """The process that forks, without a launcher's variables."""
    env = {n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_")}
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    common = {"PYTHONPATH": path, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS],
        env=env | common,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(10)


def abort(pid):
    with contextlib.suppress(ProcessLookupError):  # another rank is the one that hangs
        os.kill(pid, signal.SIGABRT)


@pytest.fixture
def run_ranks(forks, tmp_path):
    """Returns a function that starts ranks: how they ended, and what they printed."""

    def run(variables, ranks, size, script, *, port=None, env=()):
        port = port or free_port()
        jobs = [
            {"env": dict(env) | variables(rank, size, port), "script": script}
            | {"output": str(tmp_path / f"rank.{rank}")}
            for rank in ranks
        ]
        print(json.dumps(jobs), file=forks.stdin, flush=True)
        pids = json.loads(forks.stdout.readline())
        end = threading.Timer(120, lambda: [abort(pid) for pid in pids])
        end.start()
        codes = [int(forks.stdout.readline()) for _ in pids]
        end.cancel()
        texts = [Path(job["output"]).read_text() for job in jobs]
        return list(zip(codes, texts, strict=True))

    return run


def alone(rank, size, port):
    """No launcher."""
    return {}


def torchrun(rank, size, port):
    """One torchrun with so many processes."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def slurm(rank, size, port):
    """The step's port follows from the numbers of the job and the step."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_GTIDS": ",".join(map(str, range(size))),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
    }
