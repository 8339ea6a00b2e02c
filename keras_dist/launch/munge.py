"""Pass a secret to other tasks of this user, by the munge that SLURM itself uses."""

import importlib
import os
import subprocess
import time
from collections.abc import Sequence

# Under which the first host publishes a credential with the secret of its job.
PATH = "credential"

_SECONDS, _RETRY_SECONDS = 10.0, 0.5


def credential(secret: str) -> bytes:
    """Encrypt the secret so that only this user can read it, on SLURM's hosts.

    It can be read once on each host.

    Raises:
        OSError: If munge does not answer.
    """
    # The secret is on standard input: all users can read command lines.
    return _output(["munge", f"--restrict-uid={os.getuid()}"], secret.encode())


def secret_in(received: bytes) -> str:
    """Read the secret in a credential of this user.

    Raises:
        OSError: If munge does not answer, or refuses the credential.
        PermissionError: If it is of another user.
    """
    words = ["unmunge", "--numeric", "--keys=UID"]
    head, _, secret = _output(words, received).decode().partition("\n\n")
    user = head.partition(":")[2].strip()
    if user != str(os.getuid()):
        raise PermissionError(f"the credential is of user {user}")
    return secret


def received(
    address: str, port: int, *, timeout: float, stopped: Sequence[int] = ()
) -> str:
    """Return the secret of the job whose first host this is.

    Args:
        address: Address of the first host.
        port: Port of its store.
        timeout: Seconds to wait for it.
        stopped: The wait ends as soon as this list is not empty; there is none then.

    Raises:
        ValueError: If it cannot be had.
    """
    begin = time.monotonic()
    while not stopped:
        # Few launches need it, and it takes 10 ms.
        client = importlib.import_module("http.client")
        connection = client.HTTPConnection(address, port, timeout=_SECONDS)
        try:
            connection.request("GET", f"/{PATH}")
            return secret_in(connection.getresponse().read())
        except (OSError, client.HTTPException) as error:
            if time.monotonic() - begin > timeout:
                raise ValueError(
                    "The tasks of this step have no secret in common. Received: "
                    f"{address}:{port} gives none by munge ({error}). Before `srun`, "
                    "set one: export KERAS_DIST_SECRET=$(openssl rand -hex 16)"
                ) from error
        finally:
            connection.close()
        time.sleep(_RETRY_SECONDS)
    return ""


def _output(words: list[str], given: bytes) -> bytes:
    done = subprocess.run(
        words, input=given, capture_output=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        raise OSError(f"munge has refused a credential: {text or done.returncode}")
    return done.stdout
