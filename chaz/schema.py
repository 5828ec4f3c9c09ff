"""The database schema: numbered SQL files, applied in order by Alembic under an advisory lock.

``chaz schema sql`` prints the files for those who have a migration tool of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, LiteralString, cast

import psycopg

from chaz.database import Database, chaz_errors
from chaz.errors import ConfigurationError, SchemaError
from chaz.settings import without_secrets

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

# Any number that nobody else uses: "chaz" in ASCII.
ADVISORY_LOCK = 0x6368617A


@dataclass(frozen=True)
class SchemaStatus:
    """The version that the database has (None: no schema) and the one that this package needs."""

    found: str | None
    needed: str

    @property
    def current(self) -> bool:
        return self.found == self.needed


def sql_files() -> list[tuple[str, str]]:
    """Name and text of each SQL file, in order."""
    folder = files("chaz") / "sql"
    return sorted((f.name, f.read_text("utf-8")) for f in folder.iterdir() if f.name.endswith(".sql"))


def needed_version() -> str:
    """The number of the last SQL file."""
    return sql_files()[-1][0][:4]


def sql_text() -> str:
    """The whole schema as SQL text, with the version that :func:`upgrade` would leave."""
    parts = ["create schema if not exists chaz;\n"]
    parts += [f"-- {name}\n{text}" for name, text in sql_files()]
    parts.append(
        "create table chaz.alembic_version (\n"
        "    version_num varchar(32) not null constraint alembic_version_pkc primary key);\n"
        f"insert into chaz.alembic_version values ('{needed_version()}');\n"
    )
    return "\n".join(parts)


def upgrade(url: str) -> SchemaStatus:
    """Bring the database to this package's version and return what it had before and has now.

    Several at once wait for each other. Nothing is half-done: all files run in one transaction.
    Raises DatabaseUnavailable, SchemaError (a newer chaz was here), ConfigurationError (Alembic is not installed).
    """
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.util.exc import CommandError
        from sqlalchemy import create_engine, text
        from sqlalchemy.pool import NullPool
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"`chaz schema upgrade` needs the package {error.name!r}; install it with: pip install 'chaz[worker]'"
        ) from error

    with chaz_errors(without_secrets(url)):
        psycopg.connect(url, connect_timeout=10).close()
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url, connect_timeout=10), poolclass=NullPool
    )
    before = None
    with engine.connect() as connection:
        connection.execute(text("select pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
        connection.commit()
        try:
            before = _found(connection)
            connection.commit()
            config = Config()
            config.set_main_option("script_location", "chaz:migrations")
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise SchemaError(
                    f"the database has the schema {before}, which this version of chaz does not know ({error})"
                ) from error
        finally:
            connection.rollback()
            connection.execute(text("select pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
            connection.commit()
    engine.dispose()
    return SchemaStatus(found=before, needed=needed_version())


def _found(connection: Connection) -> str | None:
    from sqlalchemy import text

    if connection.scalar(text("select to_regclass('chaz.alembic_version')")) is None:
        return None
    return connection.scalar(text("select version_num from chaz.alembic_version"))


def apply_file(connection: Connection, number: str) -> None:
    """Run the SQL file of this number; called by its Alembic revision."""
    (text,) = (text for name, text in sql_files() if name.startswith(number))
    driver = cast("psycopg.Connection", connection.connection.driver_connection)
    # Without parameters, so that psycopg sends the many statements of a file as one.
    driver.execute(cast("LiteralString", text))


async def status(database: Database) -> SchemaStatus:
    """The versions found and needed."""
    (row,) = await database.fetch("select to_regclass('chaz.alembic_version') is not null as there")
    if not row["there"]:
        return SchemaStatus(found=None, needed=needed_version())
    rows = await database.fetch("select version_num from chaz.alembic_version")
    return SchemaStatus(found=rows[0]["version_num"] if rows else None, needed=needed_version())


async def require_current(database: Database) -> None:
    """Raise SchemaError unless the database has this package's version."""
    found = await status(database)
    if found.found is None:
        raise SchemaError(f"the database at {database.address} has no schema chaz")
    if found.found < found.needed:
        raise SchemaError(f"the schema chaz at {database.address} has version {found.found}, behind {found.needed}")
