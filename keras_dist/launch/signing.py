"""Sign what hosts and ranks of a job send each other, by the secret of the job."""

import hashlib
import hmac

# The variable with the secret of a job.
VARIABLE = "KERAS_DIST_SECRET"


def derived(secret: str, purpose: str) -> str:
    """Return a secret for one purpose, from which `secret` cannot be computed."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:32]


def signed(secret: str, message: bytes, *, name: str = "") -> bytes:
    """Return a message with its signature before it; without a secret, as it is.

    Args:
        secret: The secret that the receiver knows, too.
        message: The message.
        name: The name under which it is kept: the signature holds for no other one.
    """
    return _signature(secret, message, name) + message


def verified(secret: str, received: bytes, *, name: str = "") -> bytes | None:
    """Return the message that `signed` has signed; `None` if the signature is wrong."""
    length = len(_signature(secret, b"", name))
    signature, message = received[:length], received[length:]
    is_right = hmac.compare_digest(signature, _signature(secret, message, name))
    return message if is_right else None


def _signature(secret: str, message: bytes, name: str) -> bytes:
    if not secret:
        return b""  # `horovodrun` and `mpirun` set none
    text = f"{name}\n".encode() + message
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()
