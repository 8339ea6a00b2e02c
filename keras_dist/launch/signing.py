"""Sign what hosts and ranks of a job send each other, by the secret of the job."""

import hashlib
import hmac
import os
import pickle
from typing import Any

# The variable with the secret of a job.
VARIABLE = "KERAS_DIST_SECRET"

_LENGTH = 64  # of a signature


def derive_secret(secret: str, purpose: str) -> str:
    """Return a secret for one purpose, from which `secret` cannot be computed."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:32]


def add_signature(secret: str, message: bytes, *, name: str = "") -> bytes:
    """Return a message with its signature before it; without a secret, as it is.

    Args:
        secret: The secret that the receiver knows, too.
        message: The message.
        name: The name under which it is kept: the signature holds for no other one.
    """
    if not secret:
        return message  # `horovodrun` and `mpirun` set none
    text = f"{name}\n".encode() + message
    digest = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
    return digest.encode() + message


def read_signed(secret: str, received: bytes, *, name: str = "") -> bytes | None:
    """Return the message of `add_signature`; `None` if the signature is wrong."""
    message = received[_LENGTH:] if secret else received
    is_right = hmac.compare_digest(add_signature(secret, message, name=name), received)
    return message if is_right else None


def sign(value: Any) -> bytes:
    """Pickle a value for another rank, with a signature if the job has a secret."""
    return add_signature(os.environ.get(VARIABLE, ""), pickle.dumps(value))


def verify(signed: bytes) -> Any:
    """Check the signature of a message of `sign`, and return the value.

    Raises:
        RuntimeError: If the signature is not that of this job. Nothing is unpickled.

    >>> verify(sign({"loss": 0.5}))
    {'loss': 0.5}
    """
    message = read_signed(os.environ.get(VARIABLE, ""), signed)
    if message is None:
        raise RuntimeError(
            "A message from another rank does not have the signature of this job. "
            f"Received: {len(signed)} bytes. Either it came from another program, or "
            f"the ranks have different values of {VARIABLE}. Give all ranks the same."
        )
    return pickle.loads(message)
