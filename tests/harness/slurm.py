"""A SLURM of our own: two nodes on this machine, for tests; needs root and Debian's
`slurm-wlm` and `munge`."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.launching import PYTHONPATH, finish, free_port, start, until

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "munge", "runuser")

_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={ports[0]}
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    if os.geteuid() != 0:
        return "a SLURM of our own needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} missing: apt-get install slurm-wlm munge" * bool(
        absent
    )


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator["Slurm"]:
    """Context manager in which SLURM runs with the nodes n1 and n2.

    Args:
        folder: For its files.
    """
    (folder / "state").mkdir()
    facts = {"host": socket.gethostname(), "cores": os.cpu_count()}
    ports: set[int] = set()
    while len(ports) < 3:
        ports.add(free_port())
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, ports=list(ports), **facts))
    slurm = Slurm(config)
    daemons: list[subprocess.Popen[str]] = []
    try:
        if slurm.run("munge", "-n").returncode:
            for name in ("run", "var/log", "var/lib"):
                os.makedirs(f"/{name}/munge", exist_ok=True)
                shutil.chown(f"/{name}/munge", "munge", "munge")
            words = ["runuser", "-u", "munge", "--", "munged", "--foreground"]
            daemons.append(slurm.start(*words))
            slurm.until("munge", "-n")
        daemons.append(slurm.start("slurmctld", "-Dc"))
        daemons += [slurm.start("slurmd", "-DN", name) for name in ("n1", "n2")]
        slurm.until("srun", "-N2", "-n2", "--immediate=1", "true")
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.communicate()


class Slurm:
    """A SLURM that runs. Made by `nodes`."""

    def __init__(self, config: Path) -> None:
        self._env = {
            "SLURM_CONF": str(config),
            "PYTHONPATH": PYTHONPATH,
            "KERAS_DIST_SECRET": "a secret of these tests",
            "SLURM_CPU_BIND": "none",  # or the first core of both nodes has all tasks
        }

    def start(self, *words: object, **variables: str) -> "subprocess.Popen[str]":
        """Start a command that knows this SLURM."""
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        return start(words, env={**self._env, **variables}, **options)

    def run(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return finish(self.start(*words, **variables))

    def until(self, *words: object) -> None:
        """Try a command until it succeeds."""
        until(lambda: not self.run(*words).returncode, f"{words}", 30)
