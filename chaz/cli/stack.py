"""All processes of a deployment on one machine: embedded services, listener, workers, audit consumer, Flower."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from chaz import schema
from chaz.embedded import EmbeddedServices, start_services
from chaz.errors import ChazError
from chaz.settings import Settings

READY_WITHIN = 60.0
RESTART_AFTER = 1.0
STABLE_FOR = 30.0

OnLine = Callable[[str, str], None]
"""Gets the name of a process and a line that it wrote."""


class StackError(ChazError):
    """A process of the stack did not start. Args: what happened."""


class Process:
    """A process that is started again when it ends unasked."""

    def __init__(self, name: str, arguments: list[str], environment: Mapping[str, str], on_line: OnLine) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        """Lines by their first word, so that one can say what it did."""
        self.ready = threading.Event()
        self.last_line = ""
        self._arguments = arguments
        self._environment = dict(environment)
        self._on_line = on_line
        self._stopping = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._attend, name=f"chaz-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The pid of its current incarnation."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether it is not running at the moment."""
        return self._process.poll() is not None

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "chaz.cli.leashed", *self._arguments],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A Ctrl-C in the terminal is for the stack, which stops its processes in order.
            start_new_session=True,
        )

    def _attend(self) -> None:
        while True:
            started = time.monotonic()
            self._read()
            code = self._process.wait()
            if self._stopping.is_set() or not self.ready.is_set():
                return
            self._on_line(self.name, f"ended with {code}; starting it again")
            pause = RESTART_AFTER if time.monotonic() - started > STABLE_FOR else RESTART_AFTER * 2
            if self._stopping.wait(pause):
                return
            self._process = self._start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            if not text:
                continue
            self.last_line = text
            message = text.split(" ", 3)[-1]
            self.counts[message.split(" ", 1)[0]] += 1
            self._on_line(self.name, text)
            if "ready" in text:
                self.ready.set()

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self._stopping.set()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, patience: float = 30.0) -> None:
        """Stop it, by force past ``patience`` seconds, and wait for its end."""
        self.ask_to_stop()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Stack:
    """The processes of ``chaz up``. A context manager: all of them end with it."""

    def __init__(
        self,
        data: Path,
        *,
        agents: str,
        workers: int = 1,
        concurrency: int | None = None,
        flower: bool = False,
        durable: bool = True,
        celery_config: str | None = None,
        on_line: OnLine,
    ) -> None:
        self.processes: list[Process] = []
        self._on_line = on_line
        self._services: EmbeddedServices = start_services(data, durable=durable, on_event=on_line)
        try:
            self.settings = Settings.from_env(
                database_url=self._services.database_url,
                listen_url=self._services.database_url,
                broker_url=self._services.broker_url,
                agents=agents,
            )
            status = schema.upgrade(self.settings.database_url)
            on_line("schema", f"version {status.needed}" + ("" if status.current else ", upgraded"))
            self._start_processes(workers, concurrency, flower, celery_config)
        except BaseException:
            self.stop()
            raise

    def _start_processes(self, workers: int, concurrency: int | None, flower: bool, celery_config: str | None) -> None:
        environment = os.environ | {
            "CHAZ_DATABASE_URL": self.settings.database_url,
            "CHAZ_LISTEN_URL": self.settings.database_url,
            "CHAZ_BROKER_URL": self.settings.broker_url,
            "CHAZ_AGENTS": self.settings.agents,
            "PYTHONUNBUFFERED": "1",
        }
        if celery_config:
            environment["CELERY_CONFIG_MODULE"] = celery_config
        commands = {"listener": ["chaz", "listener"], "audit": ["chaz", "audit"]}
        for number in range(1, workers + 1):
            name = f"worker{number}" if workers > 1 else "worker"
            commands[name] = ["chaz", "worker", "--name", f"{name}@%h"]
            if concurrency:
                commands[name] += ["--concurrency", str(concurrency)]
        if flower:
            commands["flower"] = ["celery", "-A", "chaz", "flower", "--address=127.0.0.1"]
        for name, command in commands.items():
            self.processes.append(Process(name, command, environment, self._on_line))
        for process in self.processes:
            if process.name != "flower":
                self._wait_until_ready(process)

    @staticmethod
    def _wait_until_ready(process: Process) -> None:
        ends = time.monotonic() + READY_WITHIN
        while not process.ready.wait(0.05):
            if process.ended():
                raise StackError(f"the {process.name} did not start: {process.last_line or 'it wrote nothing'}")
            if time.monotonic() > ends:
                raise StackError(f"the {process.name} was not ready within {READY_WITHIN:g} s: {process.last_line}")

    def check(self) -> None:
        """Raise EmbeddedError if PostgreSQL or Valkey is gone, without which all others wait in vain."""
        self._services.check()

    def stop(self) -> None:
        """Stop the workers, then who listens to them, then the services."""
        for group in ("worker", "flower", "listener", "audit"):
            members = [process for process in self.processes if process.name.startswith(group)]
            for process in members:
                process.ask_to_stop()
            for process in members:
                process.stop()
        self._services.stop()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
