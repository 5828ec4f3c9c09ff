"""The owner's end of the keeper: starts it, knows what runs, stops it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from chaz.embedded import keeper
from chaz.embedded.folder import DataFolder
from chaz.errors import EmbeddedError

STARTED_WITHIN = 30.0

log = logging.getLogger(__name__)


class Supervisor:
    """Runs services under a keeper of their own.

    ``on_end`` is called, in a thread, with the name of each process that ends, its exit code (minus
    the signal) and whether :meth:`stop` had been called.
    """

    def __init__(
        self,
        services: Sequence[keeper.Service],
        *,
        folder: DataFolder,
        remove: Sequence[Path],
        on_end: Callable[[str, int, bool], None],
    ) -> None:
        self._services = {service.name: service for service in services}
        self._on_end = on_end
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._pids: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._errors: dict[str, str] = {}
        self._gone = False
        self._stopping = False
        with open(folder.log("keeper"), "ab") as errors:
            # Its own session: a Ctrl-C in the terminal is for the owner, which stops the services.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                start_new_session=True,
                pass_fds=(folder.lock,),
            )
        self._thread = threading.Thread(target=self._listen, name="chaz-embedded", daemon=True)
        self._thread.start()
        try:
            folder.name_holders(self._owner, self._keeper.pid)
            self._order(services, folder.lock, remove)
        except BaseException:
            self.stop()
            raise

    @property
    def processes(self) -> dict[str, int]:
        """Names and pids of the processes that run, the keeper among them."""
        with self._changed:
            running = {n: pid for n, pid in self._pids.items() if n not in self._ended}
            return running if self._gone else {"keeper": self._keeper.pid, **running}

    def wait_for_end(self, name: str, seconds: float) -> int | None:
        """The exit code of a service if it ends in this time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._ended or self._gone, seconds)
            if name in self._ended:
                return self._ended[name]
            if self._gone:
                raise EmbeddedError("the keeper of the embedded services was ended; start them again")
            return None

    def stop(self) -> None:
        """Stop the services and wait until they have ended. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        self._stopping = True
        # A signal, not only the end of the pipe: a forked child may hold the pipe open.
        self._keeper.terminate()
        try:
            self._keeper.wait(keeper.STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._thread.join()
        self._close_pipes()

    def _order(self, services: Sequence[keeper.Service], lock: int, remove: Sequence[Path]) -> None:
        order = {
            "owner": self._owner,
            "lock": lock,
            "services": [asdict(service) for service in services],
            "remove": [str(path) for path in remove],
        }
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
            self._keeper.stdin.flush()
        with self._changed:
            self._changed.wait_for(
                lambda: self._gone or len(self._pids) + len(self._errors) == len(services),
                STARTED_WITHIN,
            )
            if self._errors:
                name, error = next(iter(self._errors.items()))
                raise EmbeddedError(f"{name} cannot be run: {error}")
            if len(self._pids) < len(services):
                raise EmbeddedError(
                    "the keeper of the embedded services did not start; see keeper.log in the data folder"
                )

    def _listen(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            fact = json.loads(line)
            name = str(fact["name"])
            with self._changed:
                if "pid" in fact:
                    self._pids[name] = fact["pid"]
                elif "error" in fact:
                    self._errors[name] = fact["error"]
                else:
                    self._ended[name] = fact["ended"]
                self._changed.notify_all()
            if "ended" in fact:
                self._report(name, fact["ended"], self._stopping)
        code = self._keeper.wait()
        orphans = self.processes
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        if self._stopping:
            return
        # On Linux the kernel has signalled them already, and a second signal changes nothing.
        for name, pid in orphans.items():
            if name in self._services:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, self._services[name].stop_signals[0])
        self._report("keeper", code, False)

    def _report(self, name: str, code: int, asked: bool) -> None:
        try:
            self._on_end(name, code, asked)
        except Exception:
            log.exception("on_event failed for the end of %s", name)

    def _close_pipes(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
