"""Launches on hosts of `network`, and what they have printed."""

import json
import re
import time

import numpy as np

from harness.launching import RUN, wait_for_files
from harness.network import own_lines

SECRET = {"KERAS_DIST_SECRET": "a secret of these tests"}
STUB = "tests/hosts/stub.py"
TRAIN = "tests/hosts/train.py"

# Weights that each rank prints: rank, local rank, local size, host, digest.
_FOUND = re.compile(r"found (\[.*\])")


def meet(net, hosts, *words, options=(), **variables):
    """Start the same command on each of these hosts, which meet on the first one."""
    common = [*RUN, "--nnodes", len(hosts), "--rdzv", f"{hosts[0]}:29400", *options]
    env = {**SECRET, **variables}
    return [
        net.start(host, [*common, "--node-rank", number, *words], **env)
        for number, host in enumerate(hosts)
    ]


def outputs(processes):
    """What all have printed on both streams, when they have ended well."""
    found = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(found), found
    return "".join(stdout for stdout, _ in found), found[0][1]


def all_there(folder, ranks=2):
    """Wait until all ranks are there."""
    wait_for_files(*(folder / f"there.0.{rank}" for rank in range(ranks)))


def ended(process, seconds=60):
    """Wait for the end of a launcher: exit code, its own lines, and seconds."""
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=seconds)
    return process.returncode, own_lines(stderr), time.monotonic() - begin


def kill_command(net, name):
    """Kill the command that ssh has started on a host, and not ssh to another one."""
    commands = net.processes(name, "-m keras_dist run --over-ssh")
    min(commands, key=lambda command: command.create_time()).kill()


def found_of(stdout, ranks):
    """What all ranks have printed, sorted; their weights are the same bits."""
    found = sorted(json.loads(text) for text in _FOUND.findall(stdout))
    assert [each[0] for each in found] == list(range(ranks)), stdout
    assert len({each[4] for each in found}) == 1, found
    return [tuple(each[1:4]) for each in found]


def assert_equal(path, expected):
    """The ranks' weights equal one process, but for the order of sums."""
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-4, atol=1e-6)


def count_ranks(hosts):
    """How many ranks hosts such as "a:1,b:2" have."""
    return sum(int(each[2:]) for each in hosts.split(","))


def assert_trained(done, hosts, path, alone):
    """Each rank knows its place, and has the weights of plain Keras."""
    counts = {each[0]: int(each[2:]) for each in hosts.split(",")}
    assert done.returncode == 0, done.stderr
    assert f"{count_ranks(hosts)} on {len(counts)} hosts" in done.stdout
    assert found_of(done.stdout, count_ranks(hosts)) == [
        (local, count, host) for host, count in counts.items() for local in range(count)
    ]
    assert_equal(path, alone(count_ranks(hosts)))
