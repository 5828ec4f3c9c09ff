"""Whom the services run as: ourselves, or `nobody` when we are root, whom PostgreSQL refuses.

`nobody` need not reach the data folder by its path. A service enters its folder while still root,
and on Linux its programs know it as `/proc/self/cwd`, so that no parent's permissions matter and
none are changed. (A user namespace would spare the change of owner, but Docker forbids it.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from chaz.embedded.binaries import ELSEWHERE, Wheel
from chaz.errors import EmbeddedError

NOBODY = 65534
COPY_PREFIX = "chaz-programs-"


class RunAs(TypedDict):
    """Arguments of ``subprocess``."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


@dataclass(frozen=True)
class Account:
    """A user that services run as. ``user`` and ``group`` are None for ourselves."""

    user: int | None = None
    group: int | None = None

    @property
    def run_as(self) -> RunAs:
        """Arguments of ``subprocess`` that make a child run as this account."""
        return RunAs(user=self.user, group=self.group, extra_groups=None if self.user is None else [])

    def own_folder(self, path: Path) -> None:
        """Create a folder for this account alone, or see that an existing one is its own."""
        wanted = os.geteuid() if self.user is None else self.user
        if path.exists():
            if path.stat().st_uid != wanted:
                raise EmbeddedError(
                    f"{path} belongs to user {path.stat().st_uid}, and user {wanted} would run it; "
                    "start chaz as the user who made it, or use another folder"
                )
            return
        path.mkdir(mode=0o700)
        self.own_file(path)

    def own_file(self, path: Path | int) -> None:
        """Give a file or a descriptor to this account."""
        if self.user is None or self.group is None:
            return
        try:
            os.chown(path, self.user, self.group)
        except OSError as error:
            raise EmbeddedError(
                f"PostgreSQL does not run as root and user {self.user} does not exist in this "
                f"container ({error.strerror}); start chaz as another user"
            ) from error

    def name_of_cwd(self, path: Path) -> str:
        """How a service that runs in ``path`` names it."""
        return "/proc/self/cwd" if self.user is not None and sys.platform == "linux" else str(path)


def service_account() -> Account:
    """The account for the services of this process."""
    if os.geteuid() != 0:
        return Account()
    import pwd

    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        account = Account(NOBODY, NOBODY)
    else:
        account = Account(nobody.pw_uid, nobody.pw_gid)
    # Some containers have no user but root; find out before anything is made.
    with tempfile.TemporaryFile() as probe:
        account.own_file(probe.fileno())
    return account


def programs_for(account: Account, wheels: dict[Wheel, str], memory: Path) -> list[Wheel]:
    """The wheels, or copies if the account cannot run them: a venv is often below a closed /root.

    ``wheels`` has a program to try for each. ``memory`` is a file that names the copies' folder, so
    that one left behind by a killed process is removed by the next start.
    """
    forget_copy(memory)
    problem = _problems(account, wheels)
    if problem is None:
        return list(wheels)
    if account.user is None:
        raise EmbeddedError(f"cannot run {problem}; {ELSEWHERE}")
    target = Path(tempfile.mkdtemp(prefix=COPY_PREFIX))
    memory.write_text(str(target))
    copies = {wheel.copy_to(target): probe for wheel, probe in wheels.items()}
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
    problem = _problems(account, copies)
    if problem is not None:
        raise EmbeddedError(
            f"user {account.user}, who runs the services of root, cannot run {problem}; start chaz "
            "as another user, or with TMPDIR naming a folder that all can reach"
        )
    return list(copies)


def copy_in(memory: Path) -> Path | None:
    """The copy that ``memory`` names, if it is there and ours to remove."""
    if not memory.exists():
        return None
    copy = Path(memory.read_text())
    if not copy.name.startswith(COPY_PREFIX) or copy.is_symlink() or not copy.is_dir():
        return None
    return copy if copy.stat().st_uid == os.geteuid() else None


def forget_copy(memory: Path) -> None:
    """Remove the copy that ``memory`` names, and the name."""
    copy = copy_in(memory)
    if copy is not None:
        shutil.rmtree(copy, ignore_errors=True)
    memory.unlink(missing_ok=True)


def _problems(account: Account, probes: dict[Wheel, str]) -> str | None:
    """The first program that the account cannot run, and why; libraries count, so each is tried."""
    for wheel, probe in probes.items():
        program = wheel.program(probe)
        try:
            done = subprocess.run(
                [program, "--version"],
                capture_output=True,
                text=True,
                timeout=30,
                cwd="/",
                env={"LC_ALL": "C"},
                **account.run_as,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"{program}: {error}"
        if done.returncode != 0:
            return f"{program}: {done.stderr.strip() or done.returncode}"
    return None
