"""What a job has left on this host."""

import psutil


def left():
    """Processes of jobs that run now: agents, ranks, and what these have started."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_ours = any(k.startswith("KERAS_DIST_JOB_") for k in process.environ())
        except psutil.Error:
            continue
        if is_ours or "call-agent" in words:
            found.append(words)
    return found
