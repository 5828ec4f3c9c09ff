"""The doorbell: rung by whoever leaves work behind, unless a listener surely is awake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import DictRow

from tests.fixtures.postgres import ScratchDatabase, both_servers

pytestmark = both_servers

Connection = psycopg.Connection[DictRow]

SEND = "select chaz.send('s', 'message', 'ada', 'hi')"


class Ear:
    """Hears the bell."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.execute("listen chaz")

    def rings(self) -> int:
        """How often it rang since the last look: notifications of committed transactions are there at once."""
        # What was committed before this statement comes with its answer.
        self._connection.execute("select 1")
        return len(list(self._connection.notifies(timeout=0)))


@pytest.fixture
def ear(database: ScratchDatabase) -> Iterator[Ear]:
    with database.connect(autocommit=True) as connection:
        yield Ear(connection)


@pytest.fixture
def producer(database: ScratchDatabase) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def awake(database: ScratchDatabase, ahead: str) -> None:
    database.query("update chaz.doorbell set awake_until = clock_timestamp() + %(ahead)s::interval", ahead=ahead)


def test_it_rings_at_the_commit_when_nobody_is_awake(ear: Ear, producer: Connection) -> None:
    producer.execute(SEND)
    assert ear.rings() == 0
    producer.commit()
    assert ear.rings() == 1


def test_it_rings_once_per_transaction_and_again_in_the_next(ear: Ear, producer: Connection) -> None:
    for _ in range(2):
        for _ in range(5):
            producer.execute(SEND)
        producer.commit()
        assert ear.rings() == 1


def test_a_transaction_that_is_rolled_back_does_not_ring(ear: Ear, producer: Connection) -> None:
    producer.execute(SEND)
    producer.rollback()
    assert ear.rings() == 0


@pytest.mark.parametrize(
    ("ahead", "rings"),
    [("1 second", 0), ("1.9 seconds", 0), ("1 hour", 1), ("-1 microsecond", 1), ("-1 day", 1), ("3 seconds", 1)],
)
def test_only_a_listener_that_is_awake_need_not_hear(
    database: ScratchDatabase, ear: Ear, producer: Connection, ahead: str, rings: int
) -> None:
    producer.execute(SEND)
    awake(database, ahead)
    producer.commit()
    assert ear.rings() == rings


def test_it_rings_when_the_row_is_missing(database: ScratchDatabase, ear: Ear, producer: Connection) -> None:
    database.query("delete from chaz.doorbell")
    producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 1


@pytest.mark.parametrize("isolation", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_an_older_snapshot_is_not_believed(database: ScratchDatabase, ear: Ear, isolation: str) -> None:
    # The transaction sees a listener that is awake; by the time it commits, that one has long gone to sleep.
    awake(database, "1 second")
    with database.connect(isolation=isolation) as producer:
        producer.execute(SEND)
        awake(database, "-1 microsecond")
        producer.commit()
    assert ear.rings() == 1


def test_it_is_decided_at_the_commit_and_not_before(database: ScratchDatabase, ear: Ear, producer: Connection) -> None:
    awake(database, "1 second")
    producer.execute(SEND)
    awake(database, "-1 microsecond")
    producer.commit()
    assert ear.rings() == 1


def test_a_savepoint_that_is_rolled_back_takes_its_ring_away(ear: Ear, producer: Connection) -> None:
    with producer.transaction(force_rollback=True):
        producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 0


def test_a_ring_that_a_savepoint_took_away_is_made_up_for(ear: Ear, producer: Connection) -> None:
    # With immediate constraints it has rung inside the savepoint already.
    producer.execute("set constraints all immediate")
    with producer.transaction(force_rollback=True):
        producer.execute(SEND)
    producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 1


def test_an_entry_before_a_rolled_back_savepoint_rings(ear: Ear, producer: Connection) -> None:
    producer.execute(SEND)
    with producer.transaction(force_rollback=True):
        producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 1


def test_immediate_constraints_ring_still_at_the_commit(ear: Ear, producer: Connection) -> None:
    producer.execute(SEND)
    producer.execute("set constraints all immediate")
    assert ear.rings() == 0
    producer.commit()
    assert ear.rings() == 1


def test_the_caller_may_switch_it_off_for_a_transaction(ear: Ear, producer: Connection) -> None:
    producer.execute("set local chaz.bell = off")
    producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 0
    producer.execute(SEND)
    producer.commit()
    assert ear.rings() == 1


def insert(producer: Connection) -> None:
    producer.execute(
        "insert into chaz.entries (session_id, type, sender, content) values (gen_random_uuid(), 'message', 'a', 'b')"
    )


def copy(producer: Connection) -> None:
    with producer.cursor().copy("copy chaz.entries (session_id, type, sender, content) from stdin") as rows:
        rows.write_row(("00000000-0000-4000-8000-000000000000", "message", "a", "b"))


@pytest.mark.parametrize("way", [insert, copy])
def test_any_way_in_rings(ear: Ear, producer: Connection, way: Callable[[Connection], None]) -> None:
    way(producer)
    producer.commit()
    assert ear.rings() == 1


def test_an_entry_that_is_placed_already_does_not_ring(ear: Ear, producer: Connection) -> None:
    producer.execute(
        """
        insert into chaz.entries (session_id, position, type, sender, content)
        values (gen_random_uuid(), 1, 'ack', 'solo', '')
        """
    )
    producer.commit()
    assert ear.rings() == 0


RUN: LiteralString = """
    with s as (
        insert into chaz.sessions (id) values (gen_random_uuid()) returning id)
    insert into chaz.runs (id, session_id, agent, state, cause, root_run_id, deadline)
    select gen_random_uuid(), id, 'solo', %s, 'directive', id, now() + interval '1 hour' from s returning id
"""


def test_a_run_rings_when_it_becomes_queued_and_only_then(ear: Ear, producer: Connection) -> None:
    (run,) = [row["id"] for row in producer.execute(RUN, ["pending"])]
    producer.commit()
    assert ear.rings() == 0

    changes: list[tuple[LiteralString, int]] = [
        ("update chaz.runs set state = 'queued' where id = %s", 1),
        ("update chaz.runs set publishes = 1 where id = %s", 0),
        ("update chaz.runs set state = 'queued' where id = %s", 0),
        ("update chaz.runs set state = 'parked' where id = %s", 0),
        ("update chaz.runs set state = 'queued' where id = %s", 1),
    ]
    for change, rings in changes:
        producer.execute(change, [run])
        producer.commit()
        assert ear.rings() == rings, change

    producer.execute(RUN, ["queued"])
    producer.commit()
    assert ear.rings() == 1


def test_a_role_with_nothing_but_insert_rings(database: ScratchDatabase, ear: Ear, producer: Connection) -> None:
    # The role ends with the transaction that made it; a superuser's SET ROLE lasts until the trigger at its commit.
    role = sql.Identifier(f"producer_{database.name}")
    for statement in (
        "create role {}",
        "grant usage on schema chaz to {}",
        "grant insert on chaz.entries to {}",
        "set local role {}",
    ):
        producer.execute(sql.SQL(statement).format(role))
    insert(producer)
    producer.execute("set constraints all immediate")
    rung = producer.execute("select current_setting('chaz.rung', true) as rung").fetchone()
    producer.rollback()
    assert rung == {"rung": "on"}
    assert ear.rings() == 0
