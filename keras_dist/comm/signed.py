"""Pickled messages with a signature: only messages of this job are unpickled."""

import os
import pickle
from typing import Any

from keras_dist.launch import signing
from keras_dist.launch.signing import VARIABLE


def sign(value: Any) -> bytes:
    """Pickle a value, and put a signature before it if the job has a secret."""
    return signing.signed(_secret(), pickle.dumps(value))


def verify(signed: bytes) -> Any:
    """Check the signature of a message of `sign`, and return the value.

    Raises:
        RuntimeError: If the signature is not that of this job. Nothing is unpickled.

    >>> verify(sign({"loss": 0.5}))
    {'loss': 0.5}
    """
    message = signing.verified(_secret(), signed)
    if message is None:
        raise RuntimeError(
            "A message from another rank does not have the signature of this job. "
            f"Received: {len(signed)} bytes. Either it came from another program, or "
            f"the ranks have different values of {VARIABLE}. Give all ranks the same."
        )
    return pickle.loads(message)


def _secret() -> str:
    return os.environ.get(VARIABLE, "")
