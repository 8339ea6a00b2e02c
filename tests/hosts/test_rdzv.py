"""The same command on each host, without ssh: `keras-dist run --nnodes --rdzv`."""

import signal

from harness.launching import RUN
from harness.on_hosts import SECRET, STUB, all_there, ended, meet


def test_all_hosts_end_and_say_why(net, shared):
    """Three jobs at once: one with a stranger, an exit code, and SIGTERM."""
    words = [*RUN, "--nnodes", 3, "--rdzv", "a:29400", "--node-rank"]
    common = STUB, shared, "-"
    waiting = net.start("a", [*words, 0, *common], **SECRET)
    words = [*words, 1, *common]
    stranger = net.start("c", words, KERAS_DIST_SECRET="a secret of others")
    failing = meet(net, "de", STUB, shared / "rdzv.code", "exit", 1)
    saving = meet(net, "fg", STUB, shared / "rdzv.save", "save")
    all_there(shared / "rdzv.save")
    net.signal_command(saving[1], signal.SIGTERM)

    code, lines, _ = ended(stranger)
    assert code == 1
    assert "a secret that differs from the secret of the job at a:29400" in lines[0], (
        lines
    )
    net.signal_command(waiting, signal.SIGINT)
    assert ended(waiting)[0] == 128 + signal.SIGINT
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
            "keras-dist: ended by SIGTERM on g; the ranks ended together, and the "
            "same command continues the training."
        ]
    assert all((shared / "rdzv.save" / f"saved.{rank}").exists() for rank in (0, 1))
