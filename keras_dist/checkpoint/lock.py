"""The lock of a folder of checkpoints: one training at a time writes to it.

The kernel keeps the lock, and frees it when the process ends, however it ends. So a
restart after a crash is not in its own way. On a network file system the server does
so when it knows that the process is gone; where there are no such locks, what stands
in the file counts.
"""

import errno
import fcntl
import json
import os
import time
from typing import Any

_NAME = ".checkpoint.lock"

# Of a file system without locks, or whose server cannot keep them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Seconds in which a process that has the lock has written who it is.
_WRITE_SECONDS = 1.0

# A number of a process is one of this: of a host, or of a container.
_NUMBERS = "/proc/self/ns/pid"

_held: set[int] = set()  # descriptors of files that are locked


class FolderLock:
    """The lock of one folder.

    Args:
        folder: Path of the folder, which is made if there is none.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self.path = folder, os.path.join(folder, _NAME)
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            OSError: If the folder cannot be written to.
            RuntimeError: If another process has the lock.
        """
        os.makedirs(self._folder, exist_ok=True)
        while self._descriptor is None:
            # Another account may have put a link there.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                has_locks = self._lock(descriptor)
                if not has_locks and (holder := _holder(descriptor)):
                    self._check_gone(holder)
                if _is_at(self.path, descriptor):  # and was not removed meanwhile
                    self._descriptor, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        _held.add(self._descriptor)
        os.truncate(self._descriptor, 0)
        own = {**_own(), "begin": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.pwrite(self._descriptor, json.dumps(own).encode(), 0)

    def release(self) -> None:
        """Give the lock back, if this process has it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if _is_at(self.path, descriptor):
            os.remove(self.path)
        _held.discard(descriptor)
        os.close(descriptor)

    def _lock(self, descriptor: int) -> bool:
        """Lock an open file; whether there are locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            begin = time.monotonic()
            while not (holder := _holder(descriptor)):
                if time.monotonic() - begin > _WRITE_SECONDS:
                    break
                time.sleep(0.05)
            raise self._error(holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _check_gone(self, holder: dict[str, Any]) -> None:
        """Without locks: check that the process that stands in the file has ended."""
        own = _own()
        is_here = all(holder.get(name) == own[name] for name in ("host", "system"))
        if not is_here or _is_alive(holder):
            raise self._error(holder)

    def _error(self, holder: dict[str, Any]) -> RuntimeError:
        named = (
            f"process {holder.get('pid')} on host {holder.get('host')}, since "
            f"{holder.get('begin')}"
        )
        return RuntimeError(
            "Another training writes to the folder that `resume` names. Received: "
            f"resume={self._folder!r}, which is used by {named}. Wait for its end, or "
            "pass another folder. If that process is gone, with its host, remove "
            f"{self.path}"
        )


def _own() -> dict[str, Any]:
    """This process, as it stands in the file of a lock."""
    process = os.getpid()
    return {
        "host": os.uname().nodename,
        "pid": process,
        "system": _text("/proc/sys/kernel/random/boot_id") + os.readlink(_NUMBERS),
        "start": _start_of(process),
    }


def _is_alive(holder: dict[str, Any]) -> bool:
    """Check whether a recorded process of this system is still running."""
    start = _start_of(holder.get("pid"))
    return bool(start) and start == holder.get("start")


def _start_of(process: Any) -> str:
    """When a process has started, in ticks of the system; empty if there is none."""
    # Behind the name, which may contain anything, it is the 20th value.
    values = _text(f"/proc/{process}/stat").rpartition(")")[2].split()
    return values[19] if len(values) > 19 else ""


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _holder(descriptor: int) -> dict[str, Any]:
    """Read the process that stands in the file of a lock; empty if there is none."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (ValueError, RecursionError):  # it is just being written
        return {}
    return found if isinstance(found, dict) else {}


def _is_at(path: str, descriptor: int) -> bool:
    """Check whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _leave() -> None:
    """In a forked process, which would keep the lock when the rank has ended."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave)
