"""Hosts of our own on one Linux machine: network namespaces with real OpenSSH servers.

    with network.hosts("abc", shared=[folder]) as net:
        net.run("a", ["keras-dist", "run", "-H", "a:1,b:1", "script.py"])

A host has its own network, name, processes, /etc/hosts, /tmp, /dev/shm and sshd; the
rest is the machine's. Each is joined to two networks: 10.77.0.K on eth0, and 10.78.0.K
on eth1 (and fd77::K on eth0). Everything hangs on processes that the kernel ends when
this one ends, however it does: namespaces, mounts and cards go with them, and nothing
of it has a name in the file system but one folder in /run.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from harness.launching import PYTHONPATH, ROOT, finish, launch, start, until

_PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "taskset", "ssh", "ssh-keygen")
_SSHD = "/usr/sbin/sshd"

_SSHD_CONFIG = """\
HostKey {state}/host
AuthorizedKeysFile {state}/user.pub
StrictModes no
PidFile none
UsePAM no
PasswordAuthentication no
MaxStartups 100
"""
_SSH_CONFIG = """\
Host *
  IdentityFile {state}/user
  IdentitiesOnly yes
  GlobalKnownHostsFile {state}/known_hosts
  UserKnownHostsFile /dev/null
"""

# What a container may forbid even to root.
_TRY = """
mount --make-rprivate / && mount -t proc proc /proc && hostname x &&
ip link add x type bridge && ip link add y type veth peer name z
"""

# Runs as the first process of a host, and becomes its sshd.
_FIRST = """
set -e
own=$1 name=$2; shift 2
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mount --bind "$own/hosts" /etc/hosts
mount --bind "$own/hostname" /etc/hostname
mount --bind "$own/ssh_config" /etc/ssh/ssh_config
number=0
for folder; do
    number=$((number + 1)); mkdir "$own/$number"; mount --rbind "$folder" "$own/$number"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
number=0
for folder; do
    number=$((number + 1)); mkdir -p "$folder"; mount --rbind "$own/$number" "$folder"
done
cd /
exec /usr/sbin/sshd -D -e -f "$own/sshd_config"
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts of our own need root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    absent += [] if Path(_SSHD).exists() else ["sshd"]
    if absent:
        return f"{', '.join(absent)} missing: apt-get install openssh-server iproute2"
    unshare = ["unshare", "--net", "--uts", "--pid", "--ipc", "--mount", "--fork"]
    words = [*unshare, "sh", "-c", _TRY]
    tried = launch(words)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def hosts(names: str, *, shared: Sequence[Path] = ()) -> Iterator["Network"]:
    """Context manager with these hosts, of which nothing is left afterwards.

    Args:
        names: A letter for each, from "a" on.
        shared: Folders that all hosts see, also if they are in /tmp.
    """
    state = Path(tempfile.mkdtemp(prefix="keras_dist_hosts.", dir="/run"))
    network = Network(names, state, [ROOT, Path(sys.prefix), *shared])
    try:
        network.begin()
        yield network
    finally:
        network.end()


class Network:
    """Hosts, joined by a switch for each network. Made by `hosts`."""

    def __init__(self, names: str, state: Path, shared: Sequence[Path]) -> None:
        self.names, self._state = names, state
        self._shared = [str(folder) for folder in shared]
        self._switch: subprocess.Popen[bytes] | None = None
        self._first: dict[str, int] = {}
        self._changed: set[str] = set()
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[str]] = []

    def begin(self) -> None:
        """Start the switches, then all hosts."""
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("user", "host"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name]
            subprocess.run(key, cwd=self._state, check=True)
        public = (self._state / "host.pub").read_text().rsplit(maxsplit=1)[0]
        known = [
            f"{n},{self.address(n)},{self.address(n, 1)} {public}\n" for n in self.names
        ]
        (self._state / "known_hosts").write_text("".join(known))
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"]
        words += ["echo there; exec sleep inf"]
        self._switch = subprocess.Popen(words, stdout=subprocess.PIPE)
        self._switch.stdout.readline()
        for net in (0, 1):
            self._on_switch(f"ip link add switch{net} type bridge")
            self._on_switch(f"ip link set switch{net} up")
        for name in self.names:
            self._make(name)
            self.power_on(name)

    def end(self) -> None:
        """End every process, and with them all networks and mounts."""
        for name in list(self._first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first.pop(name), signal.SIGKILL)
        for process in self._hosts:
            process.wait()  # it waits for the first process of the host
        for process in self._started:
            process.kill()
            process.communicate()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        shutil.rmtree(self._state)

    def address(self, name: str, network: int = 0) -> str:
        """Address of a host on the first or second network."""
        return f"10.{77 + network}.0.{_number(name)}"

    def run(
        self, name: str, words: Sequence[object], *, timeout: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; where it takes longer, an error."""
        return finish(self.start(name, words, **env), timeout)

    def start(
        self, name: str, words: Sequence[object], **env: str
    ) -> "subprocess.Popen[str]":
        """Start a command on a host; it ends with the host, and with this process."""
        process = start(
            [*self._enter(name), "setpriv", "--pdeathsig", "KILL", *words],
            env={"PYTHONPATH": PYTHONPATH, **env},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def is_on(self, name: str) -> bool:
        """Whether a host has power."""
        return name in self._first

    def first(self, name: str) -> int:
        """Process id of a host's first process."""
        return self._first[name]

    def processes(self, name: str, *texts: str) -> list[psutil.Process]:
        """Processes of a host whose command lines contain all texts."""
        own = os.readlink(f"/proc/{self._first[name]}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/ns/pid") == own and all(
                    text in line for text in texts
                ):
                    found.append(process)
        return found

    def signal_command(self, process: subprocess.Popen, number: int) -> None:
        """Send a signal to a command that `start` has started."""
        (child,) = psutil.Process(process.pid).children()
        child.send_signal(number)

    def link(self, name: str, *, is_up: bool) -> None:
        """Plug a host's first cable in, or out."""
        self._changed.add(name)
        self._on_switch(f"ip link set to-{name}0 {'up' if is_up else 'down'}")

    def rename(self, name: str, other: str) -> None:
        """Give a host another name of its own."""
        self._changed.add(name)
        launch([*self._enter(name), "hostname", other], check=True)

    def add_bridge(self, name: str, card: str, address: str) -> None:
        """A bridge of a host's own, as a container engine makes it."""
        self._changed.add(name)
        for words in (
            f"ip link add {card} type bridge",
            f"ip addr add {address} dev {card}",
            f"ip link set {card} up",
        ):
            self._in_net(name, words)

    def power_off(self, name: str) -> None:
        """A power cut: nobody hears of it, so the cables come first."""
        for network in (0, 1):
            self._on_switch(f"ip link del to-{name}{network}")
        pid = self._first.pop(name)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid), f"the end of {name}")

    def power_on(self, name: str) -> None:
        """Start a host, and wait until its sshd answers."""
        own, number = self._state / name, _number(name)
        cores = sorted(os.sched_getaffinity(0))
        core = cores[(number - 1) % len(cores)]
        for folder in own.glob("[0-9]*"):
            folder.rmdir()
        with open(own / "log", "ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "taskset", "-c", str(core)]
                + ["unshare", "--net", "--uts", "--pid", "--ipc", "--mount", "--fork"]
                + ["--kill-child", "bash", "-c", _FIRST, "bash", str(own), name]
                + self._shared,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._hosts.append(process)
        children = psutil.Process(process.pid).children
        until(children, f"host {name}")
        pid = self._first[name] = children()[0].pid
        for network in (0, 1):
            card, port = f"eth{network}", f"to-{name}{network}"
            # The same after a power cut, so that the others find it at once.
            mac = f"02:00:00:00:{network:02x}:{number:02x}"
            link = f"ip link add {port} type veth peer name {card} address {mac}"
            self._on_switch(f"{link} netns {pid}")
            self._on_switch(f"ip link set {port} master switch{network} up")
            address = f"{self.address(name, network)}/24"
            self._in_net(name, f"ip addr add {address} dev {card}")
        self._in_net(name, f"ip addr add fd77::{number}/64 dev eth0 nodad")
        for card in ("lo", "eth0", "eth1"):
            self._in_net(name, f"ip link set {card} up")
        knock = f"nsenter -t {pid} -n bash -c 'exec 3<>/dev/tcp/127.0.0.1/22' 2>&-"
        until(lambda: not os.system(knock), f"sshd: {(own / 'log').read_text()}")

    def write_hosts(self, name: str, text: str | None = None) -> None:
        """Write a host's /etc/hosts; by default all hosts on the first network."""
        own = [f"{self.address(other)} {other}" for other in self.names]
        lines = ["127.0.0.1 localhost", *own] if text is None else [text.rstrip()]
        (self._state / name / "hosts").write_text("\n".join(lines) + "\n")

    def restore(self) -> None:
        """Names, links, firewalls and hosts as at the beginning; no job is left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for name in self.names:
            self.write_hosts(name)
            if name in self._changed and self.is_on(name):
                self.power_off(name)
            if not self.is_on(name):
                self.power_on(name)
        self._changed.clear()

    def bytes_of(self, name: str, network: int) -> int:
        """Bytes that a host's card has sent and received."""
        lines = Path(f"/proc/{self._first[name]}/net/dev").read_text().splitlines()
        (line,) = [each for each in lines if each.strip().startswith(f"eth{network}:")]
        fields = line.split(":")[1].split()
        return int(fields[0]) + int(fields[8])

    def drop_rules(self, name: str, *rules: str) -> None:
        """A firewall: rules of `ip rule` before the one for the host's own addresses.

        `blackhole` drops what comes in without a word.
        """
        self._changed.add(name)
        self._in_net(name, "ip rule flush")
        for number, rule in enumerate(rules):
            self._in_net(name, f"ip rule add pref {number + 1} iif eth0 {rule}")
        for pref, table in ((100, "local"), (101, "main"), (102, "default")):
            self._in_net(name, f"ip rule add pref {pref} lookup {table}")
        # The rule of the kernel's own stands before all others.
        self._in_net(name, "ip rule del pref 0", check=False)

    def _make(self, name: str) -> None:
        own = self._state / name
        own.mkdir()
        (own / "hostname").write_text(f"{name}\n")
        self.write_hosts(name)
        (own / "sshd_config").write_text(_SSHD_CONFIG.format(state=self._state))
        (own / "ssh_config").write_text(_SSH_CONFIG.format(state=self._state))

    def _enter(self, name: str) -> list[str]:
        pid = self._first[name]
        cores = sorted(psutil.Process(pid).cpu_affinity())
        enter = ["nsenter", "-t", str(pid), "--all", f"--wd={ROOT}"]
        return [*enter, "taskset", "-c", ",".join(map(str, cores))]

    def _in_net(self, name: str, words: str, *, check: bool = True) -> None:
        _run_in_net(self._first[name], words, check=check)

    def _on_switch(self, words: str) -> None:
        _run_in_net(self._switch.pid, words)


def _number(name: str) -> int:
    return ord(name) - ord("a") + 1


def _run_in_net(pid: int, words: str, *, check: bool = True) -> None:
    launch(["nsenter", "-t", pid, "-n", *words.split()], check=check)


def own_lines(stderr: str) -> list[str]:
    """From the launcher's first line on, but the one that says what it starts."""
    stderr = re.sub(r"keras-dist: \d+ ranks? on [^\n]*\n", "", stderr)
    return stderr[max(0, stderr.find("keras-dist: ")) :].splitlines()
