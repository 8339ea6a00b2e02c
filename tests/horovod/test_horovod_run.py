"""`hvd.run`, the timeline and the end of `keras_dist.horovod`."""

import sys

import pytest
from launch import launch

import keras_dist.horovod as hvd

_SCRIPT = """
import json, os, sys
import keras_dist.horovod as hvd

def work(path, scale=1):
    hvd.init()
    found = [hvd.rank(), hvd.size()]
    hvd.start_timeline(path, mark_cycles=True)
    found.append(float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum)) * scale)
    hvd.stop_timeline()
    found.append(hvd.is_initialized())
    hvd.shutdown()
    found.append(hvd.is_initialized())
    try:
        hvd.init()
    except RuntimeError as error:
        found.append("was shut down" in str(error))
    return found

if __name__ == "__main__":
    print("found", hvd.run(work, args=sys.argv[1:], kwargs={"scale": 2}, np=2))
"""


def test_a_function_runs_on_ranks_that_record_a_timeline_and_shut_down(tmp_path):
    """What each has returned is in rank order; a second `init` is an error."""
    script, timeline = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), str(timeline)]
    env = {"HOROVOD_TIMELINE": "DYNAMIC"}
    done = launch(command, ranks=None, timeout=200, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [[rank, 2, 6.0, True, False, True] for rank in range(2)]
    assert f"found {expected}" in done.stdout
    assert "ALLREDUCE" in timeline.read_text()


@pytest.mark.parametrize(
    "option",
    [{"hosts": "a:2"}, {"min_np": 1}, {"host_discovery_script": "x"}, {"use_mpi": 1}],
)
def test_what_run_does_not_do_is_an_error(option):
    """It names the argument, and the launchers that can."""
    with pytest.raises(ValueError, match="fixed number of ranks on this host") as error:
        hvd.run(print, np=2, **option)
    (name,) = option
    received = {"min_np": "min_num_proc"}.get(name, name)
    assert f"Received: {{'{received}'" in str(error.value)
