"""What the soak stands on: PostgreSQL and a broker, to be restarted, cut off, frozen and flushed."""

from __future__ import annotations

import importlib
import os
import signal
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any, LiteralString, cast
from uuid import uuid4

import psycopg

from chaz.broker import audit_queue, connect, forgets_bindings, run_queue
from chaz.channels import ISOLATION
from chaz.embedded import EmbeddedServices, start_services
from chaz.settings import Settings
from tests.fixtures.broker import AGENTS, Broker, delete_everything
from tests.fixtures.proxy import Proxy

OURS: LiteralString = "from pg_stat_activity where datname = current_database() and application_name like 'chaz-%'"


class Services:
    """A PostgreSQL of its own; a Valkey of its own, or a corner of the broker at ``broker_url``."""

    def __init__(self, folder: Path, broker_url: str | None) -> None:
        self._folder = folder
        self._postgres = start_services(folder / "postgres", valkey=False)
        self._valkey: EmbeddedServices | None = None
        if broker_url is None:
            self._valkey = start_services(folder / "valkey", postgres=False)
            broker_url = self._valkey.broker_url
        self.database_url = self._postgres.database_url
        self.settings = Settings(broker_url=broker_url, broker_prefix=f"soak-{uuid4().hex[:8]}")
        self.to_postgres = Proxy(self.database_url)
        """The way of half the fleet, as of a second machine."""
        self.to_broker = Proxy(broker_url)
        """The way of all."""

    @property
    def owns_broker(self) -> bool:
        """Whether the broker may be restarted."""
        return self._valkey is not None

    def restart_postgres(self, *, crash: bool) -> None:
        """Stop it, in haste with ``crash``, and start it again on its data and port."""
        if crash:
            os.kill(self._postgres.processes["postgres"], signal.SIGQUIT)
        self._postgres.stop()
        self._postgres = start_services(self._folder / "postgres", valkey=False)
        assert self._postgres.database_url == self.database_url

    def restart_broker(self) -> None:
        """Stop it as its service manager does, and start it again on its data and port."""
        assert self._valkey is not None
        self._valkey.stop()
        self._valkey = start_services(self._folder / "valkey", postgres=False)
        assert self._valkey.broker_url == self.settings.broker_url

    def cut_connections(self) -> None:
        """End a third of chaz's connections to PostgreSQL."""
        self._ask(f"select pg_terminate_backend(pid) {OURS} and random() < 1.0 / 3")

    def crash_postgres(self) -> None:
        """Kill one backend hard: PostgreSQL ends all others and recovers, as after a crash of its own."""
        _signal(signal.SIGKILL, self._ask(f"select pid {OURS} order by random() limit 1"))

    def freeze_backends(self, seconds: float) -> None:
        """Stop a third of chaz's backends, with all locks that they hold."""
        pids = self._ask(f"select pid {OURS} and random() < 1.0 / 3")
        _signal(signal.SIGSTOP, pids)
        Timer(seconds, _signal, (signal.SIGCONT, pids)).start()

    def flush_broker(self) -> None:
        """Let the broker forget what it was told, and what it was not told to keep."""
        prefix = self.settings.broker_prefix
        if forgets_bindings(self.settings):
            client: Any = importlib.import_module("redis").Redis.from_url(self.settings.broker_url)
            with client:
                for key in list(client.scan_iter(match=f"{prefix}:*")):
                    client.delete(key)
            return
        with connect(self.settings) as connection:
            for queue in (audit_queue(prefix), *(run_queue(prefix, name) for name in (*AGENTS, ISOLATION))):
                # One that nobody has declared yet is empty: the broker says so by closing the channel.
                with suppress(*connection.channel_errors), cast("Any", connection.channel()) as channel:
                    channel.queue_purge(queue.name)

    def end(self) -> None:
        """Stop what was started, and tidy a broker that goes on."""
        for proxy in (self.to_postgres, self.to_broker):
            proxy.close()
        self._postgres.stop()
        if self._valkey is None:
            delete_everything(Broker(self.settings.broker_url, self.settings.broker_prefix))
        else:
            self._valkey.stop()

    def _ask(self, query: LiteralString) -> list[int]:
        with psycopg.connect(self.database_url, autocommit=True, application_name="soak") as connection:
            return [row[0] for row in connection.execute(query)]


def freeze(proxy: Proxy, seconds: float) -> None:
    """Hand nothing on for so long."""
    proxy.freeze()
    Timer(seconds, proxy.thaw).start()


def _signal(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
