"""Pickled messages with a signature: only messages of this job are unpickled."""

import hashlib
import hmac
import os
import pickle
from typing import Any

# `keras-dist run` sets this variable to the secret of the job.
VARIABLE = "KERAS_DIST_SECRET"


def sign(value: Any) -> bytes:
    """Pickle a value, and put a signature before it if the job has a secret."""
    message = pickle.dumps(value)
    return _signature(message) + message


def verify(signed: bytes) -> Any:
    """Check the signature of a message of `sign`, and return the value.

    Raises:
        RuntimeError: If the signature is not that of this job. Nothing is unpickled.

    >>> verify(sign({"loss": 0.5}))
    {'loss': 0.5}
    """
    length = len(_signature(b""))
    signature, message = signed[:length], signed[length:]
    if not hmac.compare_digest(signature, _signature(message)):
        raise RuntimeError(
            "A message from another rank does not have the signature of this job. "
            f"Received: {len(signed)} bytes. Either it came from another program, or "
            f"the ranks have different values of {VARIABLE}. Give all ranks the same."
        )
    return pickle.loads(message)


def _signature(message: bytes) -> bytes:
    secret = os.environ.get(VARIABLE)
    if not secret:
        return b""  # horovodrun and mpirun set none
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()
