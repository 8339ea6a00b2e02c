"""The same command several times on one machine, as on the hosts of a job."""

from harness.launching import PYTHONPATH, RUN, free_port, start

SECRET = {"KERAS_DIST_SECRET": "a secret of these tests"}


def meet(*words, numbers=(0, 1), of=2, port=None):
    """Start the same command for these hosts of a job, which has so many."""
    common = [*RUN, "--nnodes", of, "--rdzv", f"127.0.0.1:{port or free_port()}"]
    env = {"PYTHONPATH": PYTHONPATH, **SECRET}
    return [start([*common, "--node-rank", n, *words], env=env) for n in numbers]


def ended(*processes, seconds=60):
    """Exit code and both outputs of each, that of the first host first."""
    found = [(p, *p.communicate(timeout=seconds)) for p in processes]
    found = [(p.returncode, stdout, stderr) for p, stdout, stderr in found]
    return sorted(found, key=lambda each: "[1] " in each[1])
