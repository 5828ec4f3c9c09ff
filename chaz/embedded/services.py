"""Starting and stopping the embedded services of a data folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from chaz.embedded.account import copy_in, forget_copy, programs_for, service_account
from chaz.embedded.binaries import Wheel
from chaz.embedded.folder import DataFolder, disk_full, explained, open_folder, tells_of_full_disk
from chaz.embedded.ports import free_port, is_free
from chaz.embedded.postgres import NAME, Postgres
from chaz.embedded.server import PasswordRefused, Server, last_lines
from chaz.embedded.supervisor import Supervisor
from chaz.embedded.valkey import Valkey
from chaz.errors import EmbeddedError

OnEvent = Callable[[str, str], None]

READY_WITHIN = 120.0
"""Seconds, for a cluster that recovers from a crash."""
PORT_RACES = 5


class PortTaken(Exception):
    """Another process was faster."""


class EmbeddedServices:
    """Services that run until :meth:`stop`, the end of ``with``, or the end of this process."""

    def __init__(self, supervisor: Supervisor, ports: dict[str, int], password: str) -> None:
        self._supervisor = supervisor
        self._ports = ports
        self._password = password

    @property
    def database_url(self) -> str:
        """The URL of the database ``chaz``, with the password."""
        address = self._address("postgres")
        return f"postgresql://{NAME}:{self._password}@{address}/{NAME}"

    @property
    def broker_url(self) -> str:
        """The URL of Valkey as Celery takes it, with the password."""
        return f"redis://:{self._password}@{self._address('valkey')}/0"

    @property
    def processes(self) -> dict[str, int]:
        """Names and pids of the processes that run: keeper, postgres, valkey."""
        return self._supervisor.processes

    def check(self) -> None:
        """Raise EmbeddedError if one of them has ended though nobody stopped it."""
        for name in self._ports:
            if self._supervisor.wait_for_end(name, 0) is not None:
                raise EmbeddedError(f"{name} has ended though nobody stopped it; start again, its data are kept")

    def stop(self) -> None:
        """Stop the services and wait for their end. Asking again does nothing."""
        self._supervisor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _address(self, name: str) -> str:
        if name not in self._ports:
            raise EmbeddedError(f"{name} was not started; start_services was told to leave it out")
        return f"127.0.0.1:{self._ports[name]}"


def start_services(
    data: Path,
    *,
    postgres: bool = True,
    valkey: bool = True,
    durable: bool = True,
    postgres_port: int | None = None,
    valkey_port: int | None = None,
    on_event: OnEvent | None = None,
) -> EmbeddedServices:
    """Start PostgreSQL and Valkey on a data folder, made if needed, and wait until both are ready.

    A folder keeps its ports from one start to the next unless they are taken; a port given here is
    taken or refused. ``durable=False`` is for tests: a crash of the machine may lose everything,
    and Valkey forgets at each stop. ``on_event`` gets a name and a line of text for all that happens;
    it is called from another thread too, where it must not call ``stop``. Raises EmbeddedError.
    """
    tell: OnEvent = _ignore if on_event is None else on_event
    fixed = {"postgres": postgres_port, "valkey": valkey_port}
    kinds: list[type[Server]] = [*[Postgres] * postgres, *[Valkey] * valkey]
    wheels = {kind.find_wheel(): kind.probe for kind in kinds}
    data = data.absolute()
    with explained(data):
        folder = open_folder(data)
        try:
            for _ in range(PORT_RACES):
                with contextlib.suppress(PortTaken):
                    return _start(folder, kinds, wheels, fixed, durable, tell)
        finally:
            folder.close()
    raise EmbeddedError("other processes took each free port first; start again")


def _start(
    folder: DataFolder,
    kinds: Sequence[type[Server]],
    wheels: dict[Wheel, str],
    fixed: dict[str, int | None],
    durable: bool,
    tell: OnEvent,
) -> EmbeddedServices:
    """One attempt, which leaves nothing running unless it succeeds."""
    memory = folder.path / "programs"
    try:
        account = service_account()
        programs = programs_for(account, wheels, memory)
        servers = [kind(folder, wheel, account, durable=durable) for kind, wheel in zip(kinds, programs, strict=True)]
        for server in servers:
            if server.prepare():
                tell(server.name, f"made {server.path}")
        ports = _choose_ports(folder, servers, fixed, tell)
        logs = {server.name: _end_of(folder.log(server.name)) for server in servers}
        supervisor = Supervisor(
            [server.service(ports[server.name]) for server in servers],
            folder=folder,
            remove=[] if (copy := copy_in(memory)) is None else [copy, memory],
            on_end=lambda name, code, asked: tell(name, _how_it_ended(folder, name, code, asked)),
        )
    except BaseException:
        forget_copy(memory)
        raise
    try:
        for server in servers:
            port = ports[server.name]
            version = _wait_until_ready(supervisor, server, port, logs[server.name], fixed)
            tell(
                server.name,
                f"ready on 127.0.0.1:{port}, {server.title} {version}, data in {server.path}",
            )
    except BaseException:
        supervisor.stop()
        raise
    return EmbeddedServices(supervisor, ports, folder.password())


def _ignore(name: str, text: str) -> None: ...


def _choose_ports(
    folder: DataFolder,
    servers: Sequence[Server],
    fixed: dict[str, int | None],
    tell: OnEvent,
) -> dict[str, int]:
    last = folder.ports()
    ports: dict[str, int] = {}
    for server in servers:
        wanted = fixed[server.name] or last.get(server.name)
        if wanted is not None and is_free(wanted):
            ports[server.name] = wanted
        elif fixed[server.name] is not None:
            raise _taken(server, fixed[server.name])
        else:
            ports[server.name] = free_port()
            if wanted is not None:
                tell(server.name, f"port {wanted} is taken, using {ports[server.name]}")
    folder.save_ports(ports)
    return ports


def _wait_until_ready(
    supervisor: Supervisor,
    server: Server,
    port: int,
    log: tuple[Path, int],
    fixed: dict[str, int | None],
) -> str:
    deadline = time.monotonic() + READY_WITHIN
    while True:
        code = supervisor.wait_for_end(server.name, 0.01)
        if code is None:
            try:
                version = server.ready(port)
            except PasswordRefused:
                # Perhaps ours is just failing because of the server that answered.
                code = supervisor.wait_for_end(server.name, 2.0)
                if code is None:
                    raise EmbeddedError(
                        f"{server.title} refuses the password in {server.folder.path}/password; "
                        "restore that file, or use another folder"
                    ) from None
            else:
                if version is not None:
                    return version
        text = _text_since(log)
        # With a full disk PostgreSQL may run on and refuse each connection.
        if tells_of_full_disk(text):
            raise disk_full(server.folder.path)
        if code is not None:
            if "Address already in use" in text:
                if fixed[server.name] is not None:
                    raise _taken(server, port)
                raise PortTaken
            raise EmbeddedError(f"{server.title} ended with {code} while starting: {last_lines(text)} ({log[0]})")
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"{server.title} was not ready within {READY_WITHIN:g} s: {last_lines(text)} ({log[0]})"
            )


def _taken(server: Server, port: int | None) -> EmbeddedError:
    return EmbeddedError(f"port {port} on 127.0.0.1 is taken; give {server.title} another, or none for a free one")


def _how_it_ended(folder: DataFolder, name: str, code: int, asked: bool) -> str:
    if asked and code == 0:
        return "stopped"
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    return f"{how}; see {folder.path / name}.log"


def _end_of(log: Path) -> tuple[Path, int]:
    return log, log.stat().st_size if log.exists() else 0


def _text_since(log: tuple[Path, int]) -> str:
    path, offset = log
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
