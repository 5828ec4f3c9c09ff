"""What PostgreSQL and Valkey have in common for the one who starts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from chaz.embedded.account import Account
from chaz.embedded.binaries import Wheel
from chaz.embedded.folder import DataFolder
from chaz.embedded.keeper import Service


class PasswordRefused(Exception):
    """A server answers on the port and does not know our password."""


class Server(ABC):
    """A server with its files in a folder of its name in the data folder."""

    name: ClassVar[str]
    title: ClassVar[str]
    probe: ClassVar[str]
    """A program whose ``--version`` tells whether the wheel's programs can run."""

    def __init__(self, folder: DataFolder, wheel: Wheel, account: Account, *, durable: bool) -> None:
        self.path = folder.path / self.name
        self.folder = folder
        self.wheel = wheel
        self.account = account
        self.password = folder.password()
        self.durable = durable

    @staticmethod
    @abstractmethod
    def find_wheel() -> Wheel:
        """The wheel that has the programs."""

    @abstractmethod
    def prepare(self) -> bool:
        """Make the files unless they are there. True if they were made."""

    @abstractmethod
    def service(self, port: int) -> Service:
        """The process to run."""

    @abstractmethod
    def ready(self, port: int) -> str | None:
        """The server's version once it can be used; None until then. Raises PasswordRefused."""


def last_lines(text: str, count: int = 3) -> str:
    """The last lines of a log as one."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:])
