"""What a job has left on this host."""

import os

import psutil

# In all processes that these tests start; its value is the id of the test process.
MARK = "KERAS_DIST_CLUSTERS_TEST"


def left():
    """Processes of jobs that run now: agents, ranks, and what these have started."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            variables = process.environ()
        except psutil.Error:
            continue
        is_ours = variables.get(MARK) == str(os.getpid())
        is_of_job = any(name.startswith("KERAS_DIST_JOB_") for name in variables)
        if is_ours and (is_of_job or "call-agent" in words):
            found.append(words)
    return found
