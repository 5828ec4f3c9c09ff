"""PostgreSQL in a data folder: made once, started, asked whether it is ready."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from chaz.embedded.binaries import postgres_wheel
from chaz.embedded.folder import alive, disk_full, tells_of_full_disk
from chaz.embedded.keeper import Service
from chaz.embedded.server import PasswordRefused, Server, last_lines
from chaz.errors import EmbeddedError

NAME = "chaz"
"""The user and the database."""
CREATE_WITHIN = 300
OLD_POSTMASTER_GONE_WITHIN = 30.0
ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # A socket's path may have 107 bytes only, and a socket trusts whoever reaches it.
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The pools of a listener, some workers and a test run beside them.
    "max_connections": "300",
}
NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class Postgres(Server):
    """The cluster of a data folder."""

    name = "postgres"
    title = "PostgreSQL"
    probe = "initdb"
    find_wheel = staticmethod(postgres_wheel)

    def prepare(self) -> bool:
        """Make the cluster, or see that the one there is of our version. True if it was made."""
        made = not self.path.exists()
        if made:
            self._create()
        self.account.own_folder(self.path)
        found = (self.path / "PG_VERSION").read_text().strip()
        installed = self.wheel.version.split(".", 1)[0]
        if found != installed:
            raise EmbeddedError(
                f"{self.path} was made by PostgreSQL {found} and {self.wheel.distribution} has "
                f"{installed}; copy the data over with pg_dump of {found}, or use another folder"
            )
        self._clear_old_pid()
        return made

    def service(self, port: int) -> Service:
        """The process to run."""
        settings = SETTINGS | {"port": str(port)} | ({} if self.durable else NOT_DURABLE)
        return Service(
            name=self.name,
            argv=[
                str(self.wheel.program("postgres")),
                "-D",
                self.account.name_of_cwd(self.path),
                *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
            ],
            cwd=str(self.path),
            log=str(self.folder.log(self.name)),
            # Fast, then immediate shutdown.
            stop_signals=[signal.SIGINT, signal.SIGQUIT, signal.SIGKILL],
            environment=ENVIRONMENT,
            user=self.account.user,
            group=self.account.group,
        )

    def ready(self, port: int) -> str | None:
        """The server's version once it answers with our password and has our database."""
        try:
            connection = psycopg.connect(
                host="127.0.0.1",
                port=port,
                user=NAME,
                password=self.password,
                dbname="postgres",
                connect_timeout=2,
                sslmode="disable",
                gssencmode="disable",
                autocommit=True,
            )
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise PasswordRefused from error
            return None
        try:
            with connection:
                found = connection.execute("select from pg_database where datname = %s", (NAME,))
                if found.rowcount == 0:
                    connection.execute("create database chaz")
                return connection.info.parameter_status("server_version")
        except psycopg.errors.DiskFull as error:
            raise disk_full(self.folder.path) from error
        except psycopg.Error as error:
            raise EmbeddedError(f"the cluster in {self.path} does not work: {error}") from error

    def _create(self) -> None:
        """Make the cluster beside its place, so that one cut short is never taken for a cluster."""
        fresh = self.path.with_name("postgres.new")
        shutil.rmtree(fresh, ignore_errors=True)
        self.account.own_folder(fresh)
        with tempfile.TemporaryFile("w+", dir=self.folder.path) as password:
            password.write(self.password + "\n")
            password.flush()
            password.seek(0)
            self.account.own_file(password.fileno())
            argv = [
                self.wheel.program("initdb"),
                f"--pgdata={self.account.name_of_cwd(fresh)}",
                f"--username={NAME}",
                f"--pwfile=/dev/fd/{password.fileno()}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--no-instructions",
            ]
            if not self.durable:
                argv.append("--no-sync")
            # It holds the lock too: if we are killed, the next start waits until it has ended.
            done = subprocess.run(
                argv,
                cwd=fresh,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=CREATE_WITHIN,
                pass_fds=(password.fileno(), self.folder.lock),
                start_new_session=True,
                **self.account.run_as,
            )
        if done.returncode != 0:
            if tells_of_full_disk(done.stdout):
                shutil.rmtree(fresh, ignore_errors=True)
                raise disk_full(self.folder.path)
            raise EmbeddedError(f"initdb ended with {done.returncode}: " + last_lines(done.stdout))
        fresh.rename(self.path)

    def _clear_old_pid(self) -> None:
        """Wait for an old postmaster to end; remove its file if another process has its pid.

        A dead postmaster's file stays: by it PostgreSQL looks for orphans in the shared memory.
        """
        file = self.path / "postmaster.pid"
        deadline = time.monotonic() + OLD_POSTMASTER_GONE_WITHIN
        while True:
            try:
                pid = int(file.read_text().split("\n", 1)[0])
            except FileNotFoundError:
                return
            except ValueError:
                file.unlink()
                return
            if not alive(pid):
                return
            if not _runs_in(pid, self.path):
                file.unlink()
                return
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"a PostgreSQL that was not started by chaz runs on {self.path}; stop it first: `kill -INT {pid}`"
                )
            time.sleep(0.05)


def _runs_in(pid: int, path: Path) -> bool:
    """Whether this process is a postmaster of the folder, and not one that got an old pid."""
    if sys.platform == "linux":
        try:
            return os.path.samefile(f"/proc/{pid}/cwd", path)
        except OSError:
            return False
    done = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True)
    return "postgres" in done.stdout
