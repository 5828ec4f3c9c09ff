"""Two-phase commit: PostgreSQL prepares nothing that has rung; a caller that does not ring is found by the long poll.

By PostgreSQL's defaults no server prepares anything, so that this one is started here.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import DictRow

from chaz.embedded import start_services
from chaz.schema import upgrade
from tests.fixtures.listeners import A_MINUTE, Listeners
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]

Connection = psycopg.Connection[DictRow]


@pytest.fixture(scope="module")
def preparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database whose server takes prepared transactions."""
    data = tmp_path_factory.mktemp("preparing")
    with (
        start_services(data, valkey=False, durable=False) as started,
        psycopg.connect(started.database_url, autocommit=True) as admin,
    ):
        admin.execute("alter system set max_prepared_transactions = 5")
    with start_services(data, valkey=False, durable=False) as started:
        upgrade(started.database_url)
        yield started.database_url


@pytest.fixture
def database(preparing: str) -> ScratchDatabase:
    """That one, for all fixtures that use a database."""
    return ScratchDatabase(preparing)


@pytest.fixture
def caller(database: ScratchDatabase) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def prepare(caller: Connection, session: str, *, bell: str = "on") -> UUID:
    """Send, and come to the end of the first phase."""
    caller.tpc_begin(session)
    caller.execute("select set_config('chaz.bell', %s, true)", [bell])
    row = caller.execute("select chaz.send(%s, 'directive', 'ada', 'go', recipient => 'solo') as id", [session])
    (sent,) = row.fetchall()
    caller.tpc_prepare()
    return sent["id"]


async def test_what_has_rung_cannot_be_prepared(listeners: Listeners, caller: Connection, stations: Stations) -> None:
    await listeners.start()
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"cannot PREPARE a transaction that has .*NOTIFY"):
        prepare(caller, "rung")
    caller.close()
    assert await stations.log("rung") == []


async def test_without_the_bell_it_is_found_by_the_long_poll(
    listeners: Listeners, caller: Connection, stations: Stations
) -> None:
    listener = await listeners.start(long_poll=0.05, sweep=A_MINUTE)
    run = prepare(caller, "kept", bell="off")
    await listener.until_naps(2)
    assert await stations.log("kept") == []
    caller.tpc_commit()
    await listener.until_published(run)
    assert await stations.state(run) == "queued"
    assert await stations.lines("kept") == [(1, "directive", "go")]


async def test_rolled_back_in_its_second_phase_it_never_happened(
    listeners: Listeners, caller: Connection, stations: Stations
) -> None:
    listener = await listeners.start(long_poll=0.05, sweep=A_MINUTE)
    prepare(caller, "gone", bell="off")
    caller.tpc_rollback()
    run = await stations.send("afterwards")
    await listener.until_published(run)
    assert await stations.log("gone") == []
