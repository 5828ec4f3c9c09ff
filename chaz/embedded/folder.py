"""The data folder: its lock, its password, its ports and its logs.

::

    chaz.lock      held by the keeper and by every service; holds the pids of owner and keeper
    password       for both services, 0600
    ports.json     the ports of the last start, taken again when they are free
    postgres/      the cluster; postgres.new/ is one that is being made
    valkey/        the append-only file
    *.log          one for each process
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Generator
from pathlib import Path

from chaz.errors import EmbeddedError

LOCK = "chaz.lock"
HARMLESS = {"lost+found", ".DS_Store", ".gitignore", ".gitkeep"}
CERTAIN_AFTER = 1.0
"""Seconds until a living holder is believed: one that was just killed may still be a zombie."""
GONE_WITHIN = 60.0
"""Seconds for the services of a holder that is gone to shut down."""
LOG_LIMIT = 8 * 1024 * 1024


class DataFolder:
    """A data folder that this process has locked. Made by :func:`open_folder`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    def close(self) -> None:
        """Give up this process's hold of the lock; a keeper that has it keeps it."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def name_holders(self, *pids: int) -> None:
        """Write who holds the lock, for the message of a start that finds it taken."""
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, " ".join(map(str, pids)).encode(), 0)

    def password(self) -> str:
        """The password of both services, made at the first start."""
        path = self.path / "password"
        if path.exists():
            return path.read_text().strip()
        if (self.path / "postgres").exists():
            raise EmbeddedError(
                f"{path} is missing, and the cluster beside it cannot be opened without it; "
                "restore the file, or use another folder"
            )
        unfinished = self.path / "password.new"
        unfinished.unlink(missing_ok=True)
        password = secrets.token_urlsafe(24)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(password + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        return password

    def ports(self) -> dict[str, int]:
        """The ports of the last start, by service."""
        try:
            return {name: int(port) for name, port in json.loads(self._ports.read_text()).items()}
        except (FileNotFoundError, ValueError):
            return {}

    def save_ports(self, ports: dict[str, int]) -> None:
        """Remember ports, beside those of services that were not started this time."""
        self._ports.write_text(json.dumps(self.ports() | ports) + "\n")

    def log(self, name: str) -> Path:
        """The log of a process; a long one makes room for a new one."""
        path = self.path / f"{name}.log"
        if path.exists() and path.stat().st_size > LOG_LIMIT:
            path.replace(path.with_suffix(".log.1"))
        return path

    @property
    def _ports(self) -> Path:
        return self.path / "ports.json"


def open_folder(path: Path) -> DataFolder:
    """Create or open a data folder and lock it. Waits for services that are still shutting down."""
    if path.exists() and not path.is_dir():
        raise EmbeddedError(f"{path} is not a folder; name a folder for the data")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = {entry.name for entry in path.iterdir()} - HARMLESS
    if names and LOCK not in names:
        raise EmbeddedError(f"{path} is not empty and was not made by chaz; name a new or an empty folder")
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(lock, path)
        folder = DataFolder(path, lock)
        folder.name_holders(os.getpid())
    except BaseException:
        os.close(lock)
        raise
    return folder


@contextlib.contextmanager
def explained(path: Path) -> Generator[None]:
    """Turn an OSError into an EmbeddedError that says what to do."""
    try:
        yield
    except BrokenPipeError:
        # Of the caller's own output, in on_event.
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EmbeddedError(
                f"{error.filename or path} cannot be used by user {os.geteuid()} "
                f"({error.strerror}); use another data folder than {path}, or mend its permissions"
            ) from error
        raise EmbeddedError(f"cannot use the data folder {path}: {error}") from error


def disk_full(path: Path) -> EmbeddedError:
    """The error for a full disk."""
    return EmbeddedError(f"no space left on the disk of {path}; make some and start again")


def tells_of_full_disk(log: str) -> bool:
    """Whether a server wrote that the disk is full."""
    return "No space left on device" in log or "Check free disk space" in log


def alive(pid: int) -> bool:
    """Whether a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _acquire(lock: int, path: Path) -> None:
    # Not on Windows, where the import of this module must still work.
    import fcntl

    start = time.monotonic()
    held_since = start
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        now = time.monotonic()
        holders = [int(pid) for pid in os.pread(lock, 64, 0).split()]
        if not holders or not all(alive(pid) for pid in holders):
            held_since = now
        elif now - held_since > CERTAIN_AFTER:
            raise EmbeddedError(f"{path} is in use by process {holders[0]}; stop it first, or use another folder")
        if now - start > GONE_WITHIN:
            raise EmbeddedError(
                f"services of an earlier start still run on {path}; end them (`lsof {path / LOCK}` lists them)"
            )
        time.sleep(0.02)
