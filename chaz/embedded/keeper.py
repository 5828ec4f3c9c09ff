"""The keeper: a process that runs the services and stops them when their owner is gone.

Run by path under ``python -I -S``: it imports the standard library only and is up in some 20 ms.
The owner sends one line of JSON on stdin and then only keeps the pipe open; the keeper answers with
a line for each fact. It stops on the end of stdin, on a new parent (a forked child of the owner may
hold the pipe too) and on a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import FrameType

PR_SET_PDEATHSIG = 1
PATIENCE = (30.0, 5.0, 5.0)
"""Seconds that a service has after each of its stop signals."""
STOP_WITHIN = sum(PATIENCE) + 5


@dataclass(frozen=True)
class Service:
    """One process to run. ``stdin`` is fed to it, so that a secret is on no command line."""

    name: str
    argv: list[str]
    cwd: str
    log: str
    stop_signals: list[int]
    stdin: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    user: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Running:
    service: Service
    process: subprocess.Popen[bytes]


def main() -> None:
    """Run what the owner's line asks for, until there is a reason to stop."""
    os.umask(0o077)
    # The owner's thread may have had signals blocked, and a mask survives exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked_to_stop.append(number))
    wake = _wake_on_signals()

    order = json.loads(sys.stdin.buffer.readline() or b"null")
    if order is None:
        return
    owner, lock = int(order["owner"]), int(order["lock"])
    running: list[Running] = []
    for values in order["services"]:
        service = Service(**values)
        try:
            running.append(Running(service, _start(service, lock)))
        except (OSError, subprocess.SubprocessError) as error:
            _tell(name=service.name, error=str(error))
        else:
            _tell(name=service.name, pid=running[-1].process.pid)

    while not asked_to_stop and os.getppid() == owner:
        readable, _, _ = select.select([0, wake], [], [], 0.5)
        if 0 in readable:
            break
        _reap(running, wake)

    # An empty lock file says to the next start that the holder is on its way out: wait for it.
    os.ftruncate(lock, 0)
    _stop(running, wake)
    for path in order["remove"]:
        _remove(path)


def _start(service: Service, lock: int) -> subprocess.Popen[bytes]:
    keeper = os.getpid()
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        # After the change of user, which would clear it. On macOS the owner ends the services of a
        # keeper that was killed.
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, service.stop_signals[0])
        if os.getppid() != keeper:
            os._exit(1)

    with open(service.log, "ab") as log:
        process = subprocess.Popen(
            service.argv,
            cwd=service.cwd,
            env=service.environment,
            stdin=subprocess.PIPE if service.stdin else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            user=service.user,
            group=service.group,
            extra_groups=None if service.user is None else [],
            pass_fds=(lock,),
            preexec_fn=in_child,
        )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(service.stdin.encode())
    return process


def _stop(running: list[Running], wake: int) -> None:
    for step, patience in enumerate(PATIENCE):
        for one in running:
            signals = one.service.stop_signals
            one.process.send_signal(signals[min(step, len(signals) - 1)])
        deadline = time.monotonic() + patience
        while running and (left := deadline - time.monotonic()) > 0:
            select.select([wake], [], [], min(left, 0.5))
            _reap(running, wake)


def _reap(running: list[Running], wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 512)
    for one in list(running):
        code = one.process.poll()
        if code is not None:
            running.remove(one)
            _tell(name=one.service.name, ended=code)


def _wake_on_signals() -> int:
    """A descriptor that becomes readable with every signal, a child's end among them."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, _only_wake)
    return read


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Handled, because the descriptor hears only of signals that have a handler."""


def _tell(**fact: str | int) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(fact).encode() + b"\n")


def _remove(path: str) -> None:
    # Seldom needed, and slow to import.
    import shutil

    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


if __name__ == "__main__":
    main()
