"""The version of keras_dist, and the oldest Keras that it works with."""

import re

__version__ = "0.1.0"

OLDEST_KERAS = (3, 10)


def require_keras(version: str) -> None:
    """Raise an `ImportError` if this version of Keras is too old.

    Older ones lack what makes sums exact and the saving of models safe. A dependency in
    the metadata does not stop `pip install --no-deps`, or a package that pins Keras.

    Args:
        version: That of the Keras that is installed.

    Raises:
        ImportError: It is older than `OLDEST_KERAS`.

    >>> require_keras("3.10.0")
    >>> require_keras("3.16.0.dev2026010103")
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    oldest = ".".join(str(part) for part in OLDEST_KERAS)
    if found < OLDEST_KERAS:
        raise ImportError(
            f"keras_dist needs Keras {oldest} or newer. Received: Keras {version}. "
            f"Run: pip install 'keras>={oldest}'"
        )
