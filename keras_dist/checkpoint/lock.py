"""The lock of a folder of checkpoints: one training at a time writes to it.

The kernel keeps the lock, and frees it when the process ends, however it ends; a
process that the rank has forked does not have it. So a restart is not in its own way.
"""

import errno
import fcntl
import os
import time
import warnings

_held: dict[str, str] = {}  # by path: the kernel does not refuse a process its own lock

# Of a file system without locks, or whose server cannot keep them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """The lock of one folder, which is made if there is none."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.path = os.path.join(os.path.realpath(folder), ".checkpoint.lock")
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            OSError: If the folder cannot be written to.
            RuntimeError: If another training has the lock.
        """
        os.makedirs(self._folder, exist_ok=True)
        if self.path in _held:
            raise self._error(_held[self.path])
        while self._descriptor is None:
            # Another account may have put a link there.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    os.close(descriptor)
                    raise self._error(holder) from None
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                warnings.warn(
                    "The file system of the folder that `resume` names has no locks: "
                    "nothing keeps another training from writing there as well. "
                    f"Received: resume={self._folder!r}, {error}.",
                    stacklevel=2,
                )
            if _is_at(self.path, descriptor):  # and was not removed meanwhile
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        begin = time.strftime("%Y-%m-%d %H:%M:%S")
        named = f"process {os.getpid()} on host {os.uname().nodename}, since {begin}"
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, named.encode(), 0)
        _held[self.path] = named

    def release(self) -> None:
        """Give the lock back, if this object has it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if _is_at(self.path, descriptor):
                os.remove(self.path)
            del _held[self.path]
            os.close(descriptor)

    def _error(self, holder: str) -> RuntimeError:
        return RuntimeError(
            "Another training writes to the folder that `resume` names. Received: "
            f"resume={self._folder!r}, which is used by {holder or 'a process'}. Wait "
            "for its end, or pass another folder. If that process is gone, with its "
            f"host, remove {self.path}"
        )


def _is_at(path: str, descriptor: int) -> bool:
    """Return True if an open file is still the one at a path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
