"""Messages that are unpickled only if a rank of this job has packed them."""

import hashlib
import hmac
import os
import pickle
from typing import Any

# Where the launcher says the secret of this job.
VARIABLE = "KERAS_DIST_SECRET"

_LENGTH = hashlib.sha256().digest_size


def sign(value: Any) -> bytes:
    """Pickle a value, and sign it where the launcher has given a secret."""
    message = pickle.dumps(value)
    return _signature(message) + message


def verify(signed: bytes) -> Any:
    """The value again.

    Raises:
        RuntimeError: If no rank of this job has signed it. Nothing is unpickled then.

    >>> verify(sign({"loss": 0.5}))
    {'loss': 0.5}
    """
    length = len(_signature(b""))
    signature, message = signed[:length], signed[length:]
    if not hmac.compare_digest(signature, _signature(message)):
        raise RuntimeError(
            "A message of another rank does not carry the signature of this job. "
            f"Received: {len(signed)} bytes. Somebody else may have written it, or the "
            f"ranks were given different values of {VARIABLE}."
        )
    return pickle.loads(message)


def _signature(message: bytes) -> bytes:
    secret = os.environ.get(VARIABLE)
    if not secret:
        return b""  # horovodrun and mpirun give none
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()
