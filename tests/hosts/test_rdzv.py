"""The same command on each host, without ssh: `keras-dist run --nnodes --rdzv`."""

import signal
import time

from network import LAUNCH, until
from test_hosts_faults import STUB, all_there, ended
from test_training import TRAIN, alone, assert_equal, debian_names, found_of

__all__ = ["alone"]  # a fixture

SECRET = {"KERAS_DIST_SECRET": "a secret of these tests"}


def meet(net, hosts, *words, options=(), is_numbered=False, **variables):
    """Start the same command on each of these hosts, which meet on the first one."""
    common = [*LAUNCH, "--nnodes", len(hosts), "--rdzv", f"{hosts[0]}:29400", *options]
    env = {**SECRET, **variables}
    return [
        net.start(
            host,
            [*common, *(["--node-rank", number] if is_numbered else []), *words],
            env=env,
        )
        for number, host in enumerate(hosts)
    ]


def outputs(processes):
    """What all have printed on both streams, when they have ended well."""
    found = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(found), found
    return "".join(stdout for stdout, _ in found), found[0][1]


def test_two_hosts_that_meet_train_as_one_process(net, shared, alone):
    """Two ranks on each, and the first host's own name is 127.0.1.1 there."""
    debian_names(net)
    path = shared / "met.npy"
    stdout, _ = outputs(meet(net, "ab", "-np", 2, TRAIN, path, is_numbered=True))
    expected = [(0, 2, "a"), (1, 2, "a"), (0, 2, "b"), (1, 2, "b")]
    assert found_of(stdout, 4) == expected
    assert "4 on 2 hosts" in stdout
    assert_equal(path, alone(4))


def test_three_hosts_that_meet_start_again_where_a_rank_is_killed(net, shared, alone):
    """The first cause is on the first host's screen; the weights are the same."""
    path = shared / "met3.npy"
    variables = {"KILL": "2", "RESUME": str(shared / "met.resume")}
    met = meet(net, "abc", "--restarts", 1, TRAIN, path, is_numbered=True, **variables)
    stdout, stderr = outputs(met)
    assert "rank 2 on c failed first" in stderr and "SIGKILL" in stderr
    assert "start 2 of at most 2" in stderr
    assert found_of(stdout, 3) == [(0, 1, "a"), (0, 1, "b"), (0, 1, "c")]
    assert_equal(path, alone(3))


def test_all_hosts_end_and_say_why(net, shared):
    """Three jobs at once: one that waits for ever, an exit code, and SIGTERM."""
    options = ["--rdzv-timeout", "8"]
    words = [*LAUNCH, "--nnodes", 3, "--rdzv", "a:29400", *options, STUB, shared, "-"]
    waiting = net.start("a", words, env=SECRET)
    joined = net.start("b", words, env=SECRET)
    stranger = net.start("c", words, env={"KERAS_DIST_SECRET": "a secret of others"})
    failing = meet(net, "de", STUB, shared / "rdzv.code", "exit", 1)
    saving = meet(net, "fg", STUB, shared / "rdzv.save", "save")
    all_there(shared / "rdzv.save")
    net.signal_command(saving[1], signal.SIGTERM)

    code, lines, _ = ended(stranger)
    assert code == 1
    assert "another secret than that of the job at a:29400" in lines[0], lines
    for process in (waiting, joined):  # the first host knows who is missing
        code, lines, _ = ended(process)
        assert code == 1
        assert "2 of 3 (a, b); missing: node rank 2" in lines[0], lines
    for process, others in zip(failing, ("Rank 0 on d was ", None), strict=True):
        code, lines, _ = ended(process)
        assert code == 70, lines
        assert lines[0].startswith("keras-dist: rank 1 on e failed first, "), lines
        assert lines[-1].startswith(others or lines[0]), lines
    assert lines[0].endswith("All of it is in the output of d.")
    for process in saving:
        code, lines, _ = ended(process)
        assert code == 128 + signal.SIGTERM
        assert lines == [
            "keras-dist: ended by SIGTERM on g; the ranks have saved, and the same "
            "command goes on from there."
        ]
    assert (shared / "rdzv.save" / "saved.0").exists()
    assert (shared / "rdzv.save" / "saved.1").exists()


def test_a_host_that_is_lost_is_named_and_may_come_back(net, shared):
    """After a power cut: within 20 s, and the same command there takes part again."""
    folder = shared / "rdzv.lost"
    words = [STUB, folder, "again"]
    options = ["--restarts", 1]
    first, _, other = meet(net, "abc", *words, options=options)
    all_there(folder, 3)
    net.power_off("b")
    cut = time.monotonic()
    line = first.stderr.readline()
    assert time.monotonic() - cut < 20
    assert line.startswith("keras-dist: host b does not answer since 15 s (rank "), line
    net.power_on("b")
    common = [*LAUNCH, "--nnodes", 3, "--rdzv", "a:29400", *options]
    back = net.start("b", [*common, *words], env=SECRET)
    for process in (first, other, back):
        code, lines, _ = ended(process)
        assert code == 0, lines
    assert all((folder / f"there.1.{rank}").exists() for rank in range(3))


def test_hosts_end_where_the_first_one_is_lost(net, shared):
    """Also by a SIGKILL of its command, which leaves nothing behind."""
    folder = shared / "rdzv.first"
    first, other = meet(net, "ab", STUB, folder, "wait")
    all_there(folder)
    net.signal_command(first, signal.SIGKILL)
    code, lines, seconds = ended(other)
    assert code == 1 and seconds < 20
    assert "no answer from a:29400 since 15 s" in lines[0], lines
    until(lambda: not net.processes("a", STUB), "the end of the ranks of a", 10)
    assert not net.processes("b", STUB)
