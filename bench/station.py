"""A process of the soak, as an orchestrator keeps it: when it has ended it is started again after a moment."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

READY = re.compile(rb"\bready\b")
UNAVAILABLE = os.EX_UNAVAILABLE
"""A process says so that is started while PostgreSQL or the broker is away."""
READY_WITHIN = 60.0
ENDED_WITHIN = 25.0
"""Seconds after SIGTERM: the grace, the time to give back, and a good deal for a busy machine."""


class Station:
    """A listener, worker or audit consumer: always the same name, one process after another."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.kind = name.rstrip("0123456789")
        self.state = "down"
        """``down``, ``starting``, ``ready``, ``frozen`` or ``ending``."""
        self.until = 0.0
        """When a process that is down is started, a frozen one thawed, and one that starts or ends given up."""
        self.problems: list[str] = []
        self.refused = 0
        """Starts that failed because a service was away."""
        self._command = [sys.executable, "-m", "chaz.cli.leashed", *command]
        self._environment = dict(environment)
        self._log = folder / f"{name}.log"
        self._offset = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the process that is there now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it now."""
        with open(self._log, "ab") as log:
            self._offset = log.tell()
            # Ends with us: its stdin is a leash. A Ctrl-C in the terminal is for the soak alone.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._log.parent,
                start_new_session=True,
            )
        self._goto("starting", READY_WITHIN)

    def kill(self, pause: float) -> None:
        """Kill it, and start it again after ``pause`` seconds."""
        if self._process is not None:
            # With the children of a prefork pool.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()
        self._goto("down", pause)

    def freeze(self, seconds: float) -> None:
        """Stop it for so long, as a machine that swaps or a debugger does."""
        self._signal(signal.SIGSTOP)
        self._goto("frozen", seconds)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.state == "frozen":
            self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._goto("ending", ENDED_WITHIN)

    def tick(self, *, restart: bool = True) -> None:
        """Do what is due."""
        now = time.monotonic()
        code = None if self._process is None else self._process.poll()
        if self._process is not None and code is not None:
            if self.state == "starting" and code == UNAVAILABLE:
                self.refused += 1
            elif self.state != "ending":
                self._complain(f"ended by itself with {code} while {self.state}")
            elif code != 0:
                self._complain(f"ended with {code} after SIGTERM")
            self._reap()
            self._goto("down", 0.5)
        elif self.state == "down" and restart and now >= self.until:
            self.start()
        elif self.state == "starting" and READY.search(self._said()):
            self._goto("ready", 0)
        elif self.state == "frozen" and now >= self.until:
            self._signal(signal.SIGCONT)
            self._goto("ready", 0)
        elif self.state in ("starting", "ending") and now >= self.until:
            self._complain(f"was still {self.state} after the time for it")
            self.kill(0.5)

    def end(self) -> None:
        """End it by any means."""
        if self._process is not None:
            self.kill(0)

    def tail(self, lines: int = 2) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""

    def _goto(self, state: str, seconds: float) -> None:
        self.state = state
        self.until = time.monotonic() + seconds

    def _complain(self, what: str) -> None:
        self.problems.append(f"{self.name} {what}:\n{self.tail()}")

    def _said(self) -> bytes:
        with open(self._log, "rb") as log:
            log.seek(self._offset)
            return log.read()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _reap(self) -> None:
        if self._process is None:
            return
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process = None
