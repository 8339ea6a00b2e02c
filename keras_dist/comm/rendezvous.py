"""The meeting of ranks whose launcher has no rendezvous: rank 0 serves it.

`srun`, `torchrun` and Ray Train tell a process its rank, and where rank 0 is. Rank 0
serves a store there, and from what every rank says of its host it makes the numbers of
all. Then Horovod finds the ranks by the same store. So do TensorFlow's own collectives.
"""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keras_dist.clusters import Place
from keras_dist.clusters.slurm import Slurm
from keras_dist.launch.hosts import ranges
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.monitor.watchdog import stay_for_readers
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.signing import derive_secret
from keras_dist.launch.store import MANY, find_store, make_slots
from keras_dist.launch.time_limits import TimeLimits

# Beginning of the names, in the store, of what ranks tell of their transports; seconds
# between two looks.
_TRANSPORT, _TICK = "transport.", 0.05


def compare_transports(
    place: Place, transport: str, *, waits: bool = False, **facts: str
) -> list[Mapping[str, str]]:
    """Tell the other ranks the transport of this one, and look at theirs.

    Args:
        place: Where this rank stands.
        transport: Name of its transport.
        waits: Whether to wait for all ranks.
        **facts: What else the others have to know.

    Returns:
        What each rank has told, if this waits for them.

    Raises:
        RuntimeError: If another rank has another transport, or ranks are missing after
            120 s.
    """
    store, limit = find_store(), TimeLimits().ranks
    if store is None:
        return []
    host, end = socket.gethostname(), time.monotonic() + limit
    own = {"transport": transport, "host": host, **facts}
    store.put(f"{_TRANSPORT}{place.rank}", own, attempts=MANY)
    while True:
        found = store.get_all(_TRANSPORT)
        if found is None and waits:  # Horovod's own store
            names = (f"{_TRANSPORT}{rank}" for rank in range(place.size))
            found = {name: store.get(name) for name in names}
        told = {
            int(name.removeprefix(_TRANSPORT)): note
            for name, note in (found or {}).items()
            if isinstance(note, dict)
        }
        for rank, note in sorted(told.items()):
            if note["transport"] != transport:
                raise RuntimeError(
                    "The ranks have different transports. Received: "
                    f"{note['transport']} on rank {rank} ({note['host']}), and "
                    f"{transport} on rank {place.rank} ({host}). Install Horovod on "
                    "all hosts or on none, or choose one for all: "
                    "KERAS_DIST_TRANSPORT=tensorflow"
                )
        if not waits or len(told) == place.size:
            return [told[rank] for rank in sorted(told)]
        if time.monotonic() > end:
            raise RuntimeError(
                f"Not all ranks have imported keras_dist within {limit:g} s. Received: "
                f"rank {place.rank} of {place.size} waits for rank "
                f"{ranges(set(range(place.size)) - set(told))}. Their own output shows "
                "the cause. To wait longer, set KERAS_DIST_RANKS_SECONDS."
            )
        time.sleep(_TICK)


# What `scontrol`, `munge` and `unmunge` have to answer.
_ANSWER_SECONDS = 20


def meet(place: Place) -> None:
    """Set the variables by which Horovod finds the other ranks of a job.

    Every rank calls it. The job's secret is `KERAS_DIST_SECRET`; without it the store
    answers whoever knows the launcher's variables, as that of `horovodrun` does. Under
    SLURM, MUNGE then passes a secret to the ranks, by which they sign Python objects.

    Args:
        place: Where this rank stands, and where the ranks meet.

    Raises:
        RuntimeError: If ranks are missing after 120 s, if their numbers contradict each
            other, if the port is in use, or if another user has made the secret.
    """
    # By the launcher's name of the host: some ranks may know an address of it alone.
    secret = os.environ.get(SECRET) or derive_secret(place.job, "without a secret")
    credential = ""
    if place.launcher == Slurm.name:
        place = replace(place, address=_resolve_node(place.address))
        if not os.environ.get(SECRET):
            credential = encode_secret(secrets.token_hex(16))
    name = socket.gethostname()
    if place.rank == 0:
        atexit.register(stay_for_readers)  # runs after Horovod's

    try:
        limit = TimeLimits().ranks
        with Meeting(place, secret, kind="rank", name=name, timeout=limit) as ranks:
            own = [name, place.local_rank, place.local_size]
            found = ranks.join(
                own, lambda all_: {"slots": make_slots(all_), "secret": credential}
            )
            variables = {**ranks.rank_variables(), **found["slots"][place.rank]}
            if credential:  # MUNGE is there: what comes without is from elsewhere
                variables[SECRET] = decode_secret(found["secret"])
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"Rank {place.rank} of {place.size}, started by {place.launcher}, does not "
            f"meet the others. {error}"
        ) from error
    os.environ.update(variables)


def encode_secret(secret: str) -> str:
    """Return a credential of MUNGE that this user alone can decode; "" without it."""
    words = ["munge", "--restrict-uid", str(os.getuid())]
    if shutil.which(words[0]) is None:
        return ""
    return _ask(words, secret).stdout


def decode_secret(credential: str) -> str:
    """Return the secret in a credential of `encode_secret`.

    Raises:
        ValueError: If it cannot be decoded, or another user has made it.
    """
    done = _ask(["unmunge"], credential)
    head, _, secret = done.stdout.partition("\n\n")
    # Ranks of one host decode the same one: all but the first are told so, by an error.
    user = re.search(r"^UID:.*\((\d+)\)$", head, re.MULTILINE)
    if not secret or user is None or int(user[1]) != os.getuid():
        raise ValueError(
            "The secret of the first rank, in a credential of MUNGE, cannot be used. "
            f"Received: {done.stderr.strip() or user}. Set one {SECRET} for all ranks."
        )
    return secret


def _resolve_node(node: str) -> str:
    """Return the name of a node, or its address if only SLURM knows the name."""
    with contextlib.suppress(OSError):
        socket.gethostbyname(node)
        return node
    text = _ask(["scontrol", "show", "node", node]).stdout
    found = re.search(r"NodeAddr=(\S+)", text)
    return found[1] if found else node  # which the error names


def _ask(words: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of the cluster, which may not answer."""
    options: Any = {"input": text, "capture_output": True, "text": True}
    try:
        return subprocess.run(words, timeout=_ANSWER_SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
