"""The faults of `chaos.py`: what each one does to a job, and what it may end."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil

BY_SSH = ("ssh", "fixed")
ALL = ("meet", *BY_SSH)

KILLED, ASKED, LOST = {128 + signal.SIGKILL, -signal.SIGKILL}, 128 + signal.SIGTERM, 1


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        happen: Lets it happen on a host of a job.
        ways: The ways to start a job that it is for.
        meeting: Exit codes that it explains of commands of hosts that meet.
        launcher: Exit codes that it explains of a launcher that uses ssh.
    """

    happen: Callable
    ways: tuple[str, ...] = ALL
    meeting: frozenset = frozenset()
    launcher: frozenset = frozenset()

    def codes(self, way):
        """Exit codes of commands that it explains."""
        return self.meeting if way == "meet" else self.launcher


def _signal(process, number):
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def processes_of_ranks(net, host):
    """The ranks of a host, and its spare processes that wait to be one.

    A rank that was a spare process keeps its command line and, in /proc/PID/environ,
    its environment of before. But its order came by a pipe, which it has closed then.
    """
    ranks, idle = [], []
    for process in net.processes(host, "monitor/rank_process.py"):
        with contextlib.suppress(psutil.Error, OSError):
            is_spare = process.cmdline()[-1] == "spare"
            is_idle = os.readlink(f"/proc/{process.pid}/fd/0") != os.devnull
            (idle if is_spare and is_idle else ranks).append(process)
    return ranks, idle


def _signal_rank(number):
    def happen(job, host, generator):
        ranks, _ = processes_of_ranks(job.net, host)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                is_spare = rank.cmdline()[-1] == "spare"
                rank.send_signal(number)
                job.hit, job.hit_spares = job.hit + 1, job.hit_spares + is_spare

    return happen


def _signal_command(number):
    """To the command of a host that meets others; by ssh, to the launcher."""

    def happen(job, host, generator):
        process = job.running.get(host if job.way == "meet" else "d")
        if process is not None and process.poll() is None:
            with contextlib.suppress(ValueError, psutil.Error):  # it ends just now
                job.net.signal_command(process, number)

    return happen


def _kill_agent(job, host, generator):
    agents = job.net.processes(host, "-m keras_dist host-agent")
    for agent in sorted(agents, key=lambda each: each.create_time())[:1]:
        _signal(agent, signal.SIGKILL)  # not its reaper


def _leave(job, host, generator):
    _signal_command(signal.SIGTERM)(job, "b" if host == "a" else host, generator)


def _cut(shortest, longest):
    def happen(job, host, generator):
        job.net.link(host, is_up=False)
        job.pause(generator.uniform(shortest, longest))
        job.net.link(host, is_up=True)

    return happen


def _power_cut(job, host, generator):
    job.net.power_off(host)
    job.pause(generator.uniform(3, 30))
    job.net.power_on(host)


# What hosts that meet may end with where the first one is lost, or they are cut off.
_ENDS = frozenset({*KILLED, LOST})

FAULTS = {
    "rank killed": Fault(_signal_rank(signal.SIGKILL)),
    "rank asked to end": Fault(_signal_rank(signal.SIGTERM)),
    "agent killed": Fault(_kill_agent, BY_SSH),
    "launcher killed": Fault(
        _signal_command(signal.SIGKILL), ALL, _ENDS, frozenset(KILLED)
    ),
    "host leaves": Fault(_leave, ("meet",), frozenset({ASKED})),
    "short cut": Fault(_cut(2, 8)),
    "long cut": Fault(_cut(18, 35), ALL, _ENDS),
    "host lost": Fault(_power_cut, ALL, _ENDS),
}

RANK_FAULTS = {"rank killed", "rank asked to end"}

# Those after which a host is behind the others, or has no checkpoint.
LOSSES = {"long cut", "host lost"}
