"""Valkey in a data folder: started, asked whether it is ready."""

from __future__ import annotations

import re
import signal
import socket

from chaz.embedded.binaries import valkey_wheel
from chaz.embedded.keeper import Service
from chaz.embedded.server import PasswordRefused, Server

# Passed on stdin: the password is then neither on a command line nor in a second file.
CONFIGURATION = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
save ""
appendonly {appendonly}
appendfsync everysec
"""


class Valkey(Server):
    """The broker of a data folder, and its append-only file."""

    name = "valkey"
    title = "Valkey"
    probe = "valkey-server"
    find_wheel = staticmethod(valkey_wheel)

    def prepare(self) -> bool:
        """Make the folder. True if it was made."""
        made = not self.path.exists()
        self.account.own_folder(self.path)
        return made

    def service(self, port: int) -> Service:
        """The process to run."""
        return Service(
            name=self.name,
            argv=[str(self.wheel.program("valkey-server")), "-"],
            cwd=str(self.path),
            log=str(self.folder.log(self.name)),
            stop_signals=[signal.SIGTERM, signal.SIGKILL],
            stdin=CONFIGURATION.format(
                port=port,
                password=self.password,
                appendonly="yes" if self.durable else "no",
            ),
            environment={"LC_ALL": "C", "TZ": "UTC"},
            user=self.account.user,
            group=self.account.group,
        )

    def ready(self, port: int) -> str | None:
        """The server's version once it answers with our password and has loaded its data."""
        request = f"AUTH {self.password}\r\nPING\r\nINFO server\r\nQUIT\r\n"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(request.encode())
                reply = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        except OSError:
            return None
        if "-WRONGPASS" in reply:
            raise PasswordRefused
        version = re.search(r"^valkey_version:(\S+)", reply, re.MULTILINE)
        return version[1] if version and "\r\n+PONG\r\n" in reply else None
