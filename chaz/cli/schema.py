"""``chaz schema upgrade | status | sql``."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from chaz import schema
from chaz.cli.options import settings_of
from chaz.database import Database

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    group = commands.add_parser("schema", help="make, upgrade or show the database schema")
    verbs = group.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, run, help in (
        ("upgrade", run_upgrade, "bring the schema to this version of chaz"),
        ("status", run_status, "show the schema's version; exit code 78 unless it is this version's"),
        ("sql", run_sql, "print the schema, for a migration tool of your own"),
    ):
        verbs.add_parser(name, parents=[common], help=help, description=help).set_defaults(run=run)


def run_upgrade(options: argparse.Namespace) -> int:
    """Apply what is missing."""
    settings = settings_of(options)
    status = schema.upgrade(settings.require_database())
    if status.current:
        print(f"the schema chaz has version {status.found} already")
    else:
        print(f"the schema chaz went from {status.found or 'nothing'} to version {status.needed}")
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Print the versions."""

    async def look() -> schema.SchemaStatus:
        database = await Database(settings_of(options).require_database(), size=1).open()
        try:
            return await schema.status(database)
        finally:
            await database.close()

    status = asyncio.run(look())
    found = f"version {status.found}" if status.found else "no schema"
    print(f"found {found}; this version of chaz needs {status.needed}")
    if not status.current:
        print("run `chaz schema upgrade`")
    return 0 if status.current else 78


def run_sql(_: argparse.Namespace) -> int:
    """Print the SQL."""
    print(schema.sql_text())
    return 0
