"""The schema, made from nothing, by several at once, by hand; and what is said of a wrong one."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, LiteralString, cast

import psycopg
import pytest

from chaz import schema
from chaz.database import Database
from chaz.errors import SchemaError
from chaz.schema import ADVISORY_LOCK, SchemaStatus
from tests.fixtures.postgres import ScratchDatabase, both_servers

pytestmark = pytest.mark.anyio

# What a schema is made of, each as sorted text.
ASPECTS: dict[str, LiteralString] = {
    "columns": """
        select table_name, column_name, ordinal_position, data_type, is_nullable, column_default, is_identity
        from information_schema.columns where table_schema = 'chaz'""",
    "constraints": """
        select conrelid::regclass::text, conname, pg_get_constraintdef(oid), condeferrable, condeferred
        from pg_constraint where connamespace = 'chaz'::regnamespace and contype <> 'n'""",
    "indexes": "select tablename, indexname, indexdef from pg_indexes where schemaname = 'chaz'",
    "functions": "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'chaz'::regnamespace",
    "triggers": """
        select tgrelid::regclass::text, pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = tgrelid
        where c.relnamespace = 'chaz'::regnamespace and not tgisinternal""",
    "options": "select relname, reloptions::text from pg_class where relnamespace = 'chaz'::regnamespace",
    "versions": "select version_num from chaz.alembic_version",
}


def described(database: ScratchDatabase) -> dict[str, list[list[Any]]]:
    with database.connect() as connection:
        return {
            aspect: sorted(([*row.values()] for row in connection.execute(query)), key=repr)
            for aspect, query in ASPECTS.items()
        }


def set_version(database: ScratchDatabase, version: str) -> None:
    database.query("update chaz.alembic_version set version_num = %(version)s", version=version)


@both_servers
def test_upgrade_makes_the_schema_and_again_does_nothing(empty_database: ScratchDatabase) -> None:
    assert schema.upgrade(empty_database.url) == SchemaStatus(found=None, needed=schema.needed_version())
    made = described(empty_database)

    again = schema.upgrade(empty_database.url)

    assert again.current
    assert described(empty_database) == made
    assert made["functions"]


@both_servers
def test_of_four_upgrades_at_once_one_applies_and_the_others_wait(empty_database: ScratchDatabase) -> None:
    with empty_database.connect(autocommit=True) as gate, ThreadPoolExecutor(4) as pool:
        gate.execute("select pg_advisory_lock(%s)", [ADVISORY_LOCK])
        upgrades = [pool.submit(schema.upgrade, empty_database.url) for _ in range(4)]
        empty_database.until_blocked(4)
        gate.execute("select pg_advisory_unlock(%s)", [ADVISORY_LOCK])
        found = [upgrade.result(30).found for upgrade in upgrades]

    assert sorted(found, key=str) == [schema.needed_version()] * 3 + [None]


@both_servers
def test_the_printed_sql_makes_what_upgrade_makes(empty_database: ScratchDatabase, database: ScratchDatabase) -> None:
    with psycopg.connect(empty_database.url) as connection:
        connection.execute(cast("LiteralString", schema.sql_text()))

    by_hand, by_upgrade = described(empty_database), described(database)

    for aspect in ASPECTS:
        assert by_hand[aspect] == by_upgrade[aspect], aspect
    assert schema.upgrade(empty_database.url).current


def test_a_failed_upgrade_leaves_nothing(empty_database: ScratchDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    files = schema.sql_files()
    broken = [(files[0][0], files[0][1] + "\ncreate table chaz.half_done (); select 1 / 0;"), *files[1:]]
    with monkeypatch.context() as patched:
        patched.setattr(schema, "sql_files", lambda: broken)
        with pytest.raises(Exception, match="division by zero"):
            schema.upgrade(empty_database.url)

    assert empty_database.value("select to_regclass('chaz.entries')") is None
    assert schema.upgrade(empty_database.url).found is None


async def checked(database: ScratchDatabase) -> None:
    opened = Database(database.url)
    try:
        await schema.require_current(opened)
    finally:
        await opened.close()


async def test_a_missing_schema_is_told(empty_database: ScratchDatabase) -> None:
    with pytest.raises(SchemaError, match=r"has no schema chaz; run `chaz schema upgrade`"):
        await checked(empty_database)


async def test_a_schema_behind_is_told(database: ScratchDatabase) -> None:
    await checked(database)
    set_version(database, "0000")
    with pytest.raises(SchemaError, match=r"has version 0000, behind \d{4}; run `chaz schema upgrade`"):
        await checked(database)


async def test_a_newer_schema_is_served_but_not_upgraded(database: ScratchDatabase) -> None:
    # In a rolling deploy the schema goes first, and processes of the version before go on.
    set_version(database, "9999")
    await checked(database)
    with pytest.raises(SchemaError, match="9999"):
        schema.upgrade(database.url)


def test_the_files_are_numbered_without_a_gap() -> None:
    names = [name for name, _ in schema.sql_files()]
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", name) for name in names)
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
