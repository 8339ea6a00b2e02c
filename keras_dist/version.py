"""The version of keras_dist, and of Keras and TensorFlow that it works with."""

import importlib.metadata
import re

__version__ = "1.0.0"

OLDEST_KERAS = (3, 10)

# Horovod 0.28.1 was built and tested with each TensorFlow of this range.
FIRST_TENSORFLOW = (2, 18)
LAST_TENSORFLOW = (2, 21)


def format_version(version: tuple[int, ...]) -> str:
    """Write a version.

    >>> format_version((3, 10))
    '3.10'
    """
    return ".".join(str(part) for part in version)


def parse_version(version: str) -> tuple[int, ...]:
    """Return major and minor version; `()` for what is no version.

    >>> [parse_version(text) for text in ("3.16.0.dev2026010103", "2.22.0rc0", "none")]
    [(3, 16), (2, 22), ()]
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()


# In sentences, and for pip.
TENSORFLOW_RANGE = (
    f"{format_version(FIRST_TENSORFLOW)} to {format_version(LAST_TENSORFLOW)}"
)
TENSORFLOW = (
    f"tensorflow>={format_version(FIRST_TENSORFLOW)},"
    f"<{LAST_TENSORFLOW[0]}.{LAST_TENSORFLOW[1] + 1}"
)
KERAS = f"keras>={format_version(OLDEST_KERAS)},<4"

# Distributions that have the module `tensorflow`.
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly")


def installed_tensorflow() -> tuple[str, str | None]:
    """Return name and version of the installed distribution of TensorFlow."""
    for name in TENSORFLOWS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "tensorflow", None


def require(package: str, version: str, oldest: tuple[int, int]) -> None:
    """Raise an `ImportError` if a version is too old.

    An older Keras lacks what makes sums exact and the saving of models safe. A
    dependency in the metadata does not stop `pip install --no-deps`, or a package that
    pins another version; and TensorFlow is the user's own.

    Args:
        package: "Keras" or "TensorFlow".
        version: The version that is installed.
        oldest: The oldest that keras_dist works with.

    Raises:
        ImportError: It is older than `oldest`.

    >>> require("Keras", "3.10.0", OLDEST_KERAS)
    >>> require("TensorFlow", "2.23.0-dev20261026", FIRST_TENSORFLOW)
    """
    if parse_version(version) < oldest:
        is_keras = package == "Keras"
        distribution = "keras" if is_keras else installed_tensorflow()[0]
        raise ImportError(
            f"keras_dist needs {package} {format_version(oldest)} or newer. "
            f"Received: {package} {version}. "
            f"Run: pip install '{distribution}>={format_version(oldest)}'"
        )
