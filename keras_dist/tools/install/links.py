"""Wheels that others have built: a folder or an address with their SHA-256 sums.

`SHA256SUMS`, as `sha256sum` writes it, is also the list of what is there: no folder is
listed, and no page of links is read. `make wheels` fills such a folder.
"""

import hashlib
import http.client
import re
import urllib.parse
import urllib.request
from pathlib import Path

from keras_dist.tools.install.steps import InstallError

_SUMS = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\s]+)")

_SECONDS = 60.0


class Links:
    """Wheels of a folder or an address, copied and checked before they are used.

    Args:
        place: The folder, or the address, which begins with `http://`, `https://` or
            `file://`.
        copies: A folder of our own: what is installed is what was checked, whatever
            happens to `place` meanwhile.

    Raises:
        InstallError: If `SHA256SUMS` cannot be read.
    """

    def __init__(self, place: str, copies: Path) -> None:
        self.place = place.rstrip("/")
        self._copies = copies
        self._sums = sums_of(self._read(_SUMS).decode(errors="replace"))

    @property
    def names(self) -> list[str]:
        """The wheels of Horovod that `SHA256SUMS` names."""
        return [name for name in self._sums if re.fullmatch(r"horovod-.*\.whl", name)]

    def fetch(self, name: str) -> Path:
        """Copy a wheel, check its sum, and return the path of the copy.

        Args:
            name: One of `names`.

        Raises:
            InstallError: If it cannot be read, or has another sum.
        """
        content = self._read(name)
        received = hashlib.sha256(content).hexdigest()
        if received != self._sums[name]:
            raise InstallError(
                f"{name} is not the file that SHA256SUMS names: its SHA-256 sum "
                f"differs. Received: {received} from {self.place}, instead of "
                f"{self._sums[name]}. Nothing was installed. Copy both files again."
            )
        path = self._copies / name
        path.write_bytes(content)
        return path

    def _read(self, name: str) -> bytes:
        try:
            if "://" not in self.place:
                return Path(self.place, name).read_bytes()
            address = f"{self.place}/{urllib.parse.quote(name)}"
            with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
                return answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InstallError(
                "`--find-links` must be a folder or an address with SHA256SUMS and the "
                f"wheels that it names. Received: {self.place}, of which {name} cannot "
                f"be read: {type(error).__name__}: {error}. Nothing was installed."
            ) from error


def sums_of(text: str) -> dict[str, str]:
    """Parse the output of `sha256sum`: the sum of each file.

    >>> sums_of("0" * 64 + "  a.whl\\n")["a.whl"] == "0" * 64
    True
    """
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    return {match[2]: match[1] for match in matches if match}
