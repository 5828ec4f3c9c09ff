"""The log is append-only, by the database's own word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest
from psycopg.rows import DictRow

from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.stations import Stations, a_call

pytestmark = both_servers

APPEND_ONLY = "CZ004"


@pytest.fixture
def log(database: ScratchDatabase) -> Iterator[psycopg.Connection[DictRow]]:
    """A transaction that sees one placed and one unplaced entry."""
    database.query("select chaz.send('s', 'message', 'ada', 'placed')")
    database.query("update chaz.entries set position = 1")
    database.query("select chaz.send('s', 'message', 'ada', 'unplaced')")
    with database.connect() as connection:
        yield connection
        connection.rollback()


@pytest.mark.parametrize(
    "change",
    [
        "update chaz.entries set content = 'another'",
        "update chaz.entries set position = position where position is not null",
        "update chaz.entries set position = 2 where position = 1",
        "update chaz.entries set position = null",
        "update chaz.entries set position = 2, content = 'another' where position is null",
        "update chaz.entries set position = 2, metadata = '{\"a\": 1}' where position is null",
        "update chaz.entries set position = 2, sender = 'eve' where position is null",
        "update chaz.entries set position = 2, created_at = now() where position is null",
        "update chaz.entries set position = 2, run_id = id where position is null",
        "delete from chaz.entries",
        "truncate chaz.entries",
    ],
)
def test_a_change_is_refused(log: psycopg.Connection[DictRow], change: LiteralString) -> None:
    with pytest.raises(psycopg.Error, match="append-only") as refused:
        log.execute(change)
    assert refused.value.sqlstate == APPEND_ONLY


def test_placing_is_the_one_change(log: psycopg.Connection[DictRow]) -> None:
    assert log.execute("update chaz.entries set position = 2 where position is null").rowcount == 1


def test_retention_may_delete_and_not_truncate(log: psycopg.Connection[DictRow]) -> None:
    log.execute("create role chaz_retention")
    log.execute("grant usage on schema chaz to chaz_retention")
    log.execute("grant select, delete, truncate on chaz.entries to chaz_retention")
    log.execute("set role chaz_retention")
    assert log.execute("delete from chaz.entries").rowcount == 2
    with pytest.raises(psycopg.Error, match="append-only"):
        log.execute("truncate chaz.entries")


@pytest.mark.anyio
async def test_a_call_stays_until_the_trail_is_complete(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("word_count"))
    await stations.start_call(claim)
    await stations.finish_call(claim)
    for _ in range(2):
        with pytest.raises(psycopg.DatabaseError, match="stays until the run has ended and its audit trail") as refused:
            database.query("delete from chaz.calls")
        assert refused.value.sqlstate == "CZ004"
        if await stations.state(claim.run_id) == "running":
            await stations.end(claim)
    database.query("update chaz.runs set audit_after = null")
    database.query("delete from chaz.calls")
    assert database.query("select from chaz.calls") == []
