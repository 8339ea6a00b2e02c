"""Type `keras-dist run --nnodes N --node-rank K --rdzv …` on each host, by ssh.

On standard input each gets a line of JSON with its environment, and the job's secret in
it, and then the number of each signal that this process receives. When this process
ends, for whatever reason, so does the input, and with it what was started there.
"""

import contextlib
import io
import json
import os
import random
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from keras_dist.launch.hosts import find_address_towards, is_here, parse_endpoint
from keras_dist.launch.output import SCREEN, print_message
from keras_dist.launch.ranks import note_signals
from keras_dist.launch.signing import VARIABLE as SECRET

# A firewall that drops port 22 is noticed after 10 s, not 134; a lost host after 30 s.
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
_SSH += ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]

# Variables of this host or this login session, which are not passed to other hosts.
_NOT_PASSED_ON = re.compile(
    r"BASH_FUNC_.*|DISPLAY|HOME|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|SSH_.*"
    r"|TMPDIR|USER|XDG_.*|_"
)

# Ports of the job's store that nobody else is likely to use.
_PORTS = range(20_000, 30_000)

# Seconds in which all commands end after one has; and after the end of their input.
_TOGETHER_SECONDS, _END_SECONDS, _TICK = 3.0, 2.0, 0.1

# The exit code of ssh where the connection, or the command, was lost.
_LOST = 255


def run_by_ssh(hosts: Mapping[str, int], words: Sequence[str], rdzv: str | None) -> int:
    """Run a job on hosts, by ssh or on this one; return its exit code.

    Args:
        hosts: The hosts, and the number of ranks of each.
        words: Options of `keras-dist run`, and the command of the ranks.
        rdzv: Address and port at which the hosts meet; by default the name of the first
            one, and a random port.
    """
    first, *_ = hosts
    if rdzv is None:
        address = first.rpartition("@")[2]
        if is_here(first):
            other = next(host for host in hosts if not is_here(host))
            address = find_address_towards(other)
        rdzv = f"{address}:{random.choice(_PORTS)}"
    parse_endpoint(rdzv)
    environ = os.environ.items()
    passed_on = {n: v for n, v in environ if not _NOT_PASSED_ON.fullmatch(n)}
    passed_on[SECRET] = secrets.token_hex(16)
    commands: dict[str, subprocess.Popen[bytes]] = {}
    stopped = note_signals()
    try:
        for number, (host, count) in enumerate(hosts.items()):
            options = ["--over-ssh", "--nnodes", len(hosts), "--node-rank", number]
            options += ["--rdzv", rdzv, "-np", count]
            commands[host] = _start(host, [*map(str, options), *words])
            named = {**passed_on, "HOROVOD_HOSTNAME": host.rpartition("@")[2]}
            _write(commands[host], json.dumps(named))
        return _wait(commands, stopped)
    finally:
        _end(commands)
        SCREEN.leave(stopped)


def _start(host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `keras-dist run` on a host."""
    run = [sys.executable, "-m", "keras_dist", "run", *words]
    if not is_here(host):
        # Nothing secret: all users can read the command lines of processes.
        path = [f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
        line = shlex.join(["cd", os.getcwd()])
        line += f" && exec {shlex.join(['env', *path, *run])}"
        # What stands behind `--` is no option, whatever a host is called.
        run = [*_SSH, "--", host, line]
    return subprocess.Popen(
        run,
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches only this process
    )


def _write(command: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to the standard input of a command."""
    assert command.stdin is not None
    with contextlib.suppress(OSError):  # its exit code shows that it has ended
        command.stdin.write(f"{line}\n".encode())
        command.stdin.flush()


def read_environment() -> None:
    """On a host, read the first line of standard input."""
    os.environ.update(json.loads(io.FileIO(0, closefd=False).readline()))


def _wait(
    commands: Mapping[str, subprocess.Popen[bytes]], stopped: Sequence[int]
) -> int:
    """Wait until the commands of all hosts have ended, or one alone."""
    (first, *_), told, begin = commands, 0, 0.0
    while True:
        time.sleep(_TICK)
        for number in stopped[told:]:
            told += 1
            for command in commands.values():
                _write(command, str(number))
        polled = {host: command.poll() for host, command in commands.items()}
        codes = {host: code for host, code in polled.items() if code is not None}
        begin = (begin or time.monotonic()) if codes else 0.0
        code = codes.get(first, _LOST)
        if 0 <= code != _LOST or len(codes) == len(commands):
            return code  # the first host leaves last, with the job's code
        if begin and time.monotonic() - begin > _TOGETHER_SECONDS:
            host, code = next(iter(codes.items()))
            print_message(
                f"keras-dist: the command on {host} ended before the others, or the "
                f"connection to it was lost: exit code {code}. The commands on the "
                "other hosts are ended, too."
            )
            return code or 1


def _end(commands: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End all commands, after the time in which they print their rest."""
    for command in commands.values():
        with contextlib.suppress(OSError):
            command.stdin and command.stdin.close()  # as if this process were gone
    end = time.monotonic() + _END_SECONDS
    for command in commands.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(max(0.0, end - time.monotonic()))
        command.kill()
        command.wait()
