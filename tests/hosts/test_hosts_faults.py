"""What happens to hosts is named, and ends or restarts the job, with its exit code."""

import signal
import time
from functools import partial

import pytest
from harness.launching import RUN, allow, until
from harness.on_hosts import STUB, all_there, ended, kill_command


def start(net, shared, name, case, *options, hosts="a:1,b:1", rank=()):
    """Start ranks that wait, and return the launcher and their folder."""
    folder = shared / name
    words = [*RUN, *options, "-H", hosts, STUB, folder, case, *rank]
    return net.start(hosts[0], words), folder


def test_exit_codes_and_reports_of_ranks_travel_to_the_launcher(net, shared):
    """Three jobs at once: 70, with the host; 75, all have saved; SIGTERM, all save."""
    stalled, _ = start(net, shared, "code", "exit", rank="1")
    asked, _ = start(net, shared, "saved", "saved", hosts="c:1,d:1")
    saving, folder = start(net, shared, "save", "save", hosts="e:1,f:1")
    all_there(folder)
    net.signal_command(saving, signal.SIGTERM)

    code, lines, _ = ended(stalled)  # the rank has reported, and is still ending
    assert code == 70, lines
    assert lines[0].startswith("keras-dist: rank 1 on b failed first, "), lines
    assert lines[-1].startswith("Rank 0 on a was "), lines
    code, lines, _ = ended(asked)
    assert code == 75
    assert lines == [
        "keras-dist: the ranks were asked to end by SIGTERM, and ended together. "
        "The same command continues the training."
    ]
    code, lines, _ = ended(saving)  # after 5 s, and not two as after a failure
    assert code == 128 + signal.SIGTERM, lines
    assert lines == [
        "keras-dist: ended by SIGTERM; the ranks ended together, and the same command "
        "continues the training."
    ]
    assert (folder / "saved.0").exists() and (folder / "saved.1").exists()


def test_a_hosts_file_may_name_users_whose_home_is_their_own(net, shared):
    """As `horovodrun` has them; what belongs to a user is not handed over."""
    file, folder = shared / "hostfile", shared / "home"
    file.write_text("# two hosts\na slots=1\n\nroot@b slots=1  # by another name\n")
    words = [*RUN, "--hostfile", file, STUB, folder, "wait"]
    process = net.start("a", words, HOME="/somewhere", MINE="handed over")
    all_there(folder)
    assert (folder / "there.0.0").read_text() == "/somewhere"
    assert (folder / "there.0.1").read_text() == "/root"
    _, rank = net.processes("b", "monitor/", STUB)  # behind its parent
    assert rank.environ()["MINE"] == "handed over"
    net.signal_command(process, signal.SIGINT)
    assert ended(process)[0] == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "killed", ["a", pytest.param("b", marks=pytest.mark.long), "launcher"]
)
def test_nothing_is_left_where_a_command_or_the_launcher_is_killed(net, shared, killed):
    """No process and no folder on any host; the killed command's host is named."""
    process, folder = start(net, shared, killed, "wait")
    all_there(folder)
    if killed in "ab":
        kill_command(net, killed)
        code, lines, seconds = ended(process)
        number = {"a": -signal.SIGKILL, "b": 255}[killed]  # a is here, b behind ssh
        assert code == number % 256 and seconds < allow(15)
        assert lines == [
            f"keras-dist: the command on {killed} ended before the others, or the "
            f"connection to it was lost: exit code {number}. The commands on the "
            "other hosts are ended, too."
        ]
    else:
        net.signal_command(process, signal.SIGKILL)
    for name in "ab":
        until(lambda name=name: not net.processes(name, STUB), f"the end of {name}")
        look = partial(net.run, name, ["ls", "/tmp"])
        until(lambda look=look: "keras_dist." not in look().stdout, "an empty /tmp")


def test_a_host_that_is_lost_or_behind_a_firewall_is_named(net, shared):
    """Four jobs at once: a power cut, an outage of 10 s, and two kinds of firewall."""
    net.drop_rules("d", "ipproto tcp dport 22 blackhole")
    let_in = [f"ipproto tcp {port} 22 lookup local" for port in ("dport", "sport")]
    net.drop_rules("e", *let_in, "ipproto tcp blackhole")
    started = time.monotonic()
    lost, there = start(net, shared, "lost", "again", "--restarts", "2")
    shut, _ = start(net, shared, "shut", "wait", hosts="c:1,d:1")
    only_ssh, _ = start(net, shared, "only", "wait", hosts="e:1,f:1")
    outage, others = start(net, shared, "outage", "wait", hosts="g:1,h:1")
    all_there(there)
    all_there(others)
    net.link("h", is_up=False)
    cut = time.monotonic()
    net.power_off("b")

    time.sleep(max(0.0, cut + 10 - time.monotonic()))
    net.link("h", is_up=True)
    code, lines, _ = ended(lost)  # a lost host is no reason to start again
    assert time.monotonic() - cut < allow(20)
    assert code == 1, lines
    assert lines[0] == "keras-dist: host b has not responded for 15 s (rank 1)."
    assert lines[1].startswith("Rank 0 on a was ") and len(lines) == 2, lines

    code, lines, _ = ended(only_ssh)
    assert code == 1 and time.monotonic() - started < allow(40)
    lines = [line for line in lines if "waiting" not in line]
    assert "f cannot reach 10.77.0.5:" in lines[0], lines
    early = "keras-dist: the command on {} ended before the others"
    assert lines[1].startswith(early.format("f")), lines
    code, lines, _ = ended(shut)
    assert code == 255
    assert lines[0].startswith(early.format("d")), lines
    assert outage.poll() is None and net.processes("h", STUB)


def test_a_host_with_ipv6_addresses_alone_is_named(net, shared):
    """At once, and with the option that helps."""
    net.write_hosts("a", "127.0.0.1 localhost\n10.77.0.1 a\nfd77::2 b\n")
    process, _ = start(net, shared, "ipv6", "wait")
    code, (line,), seconds = ended(process)
    assert code == 1 and seconds < allow(10)
    assert "b (" in line and "Ranks connect by IPv4." in line
    assert "--rdzv" in line
