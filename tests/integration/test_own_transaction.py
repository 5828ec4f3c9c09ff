"""Sending inside the caller's own transaction: with psycopg and SQLAlchemy, at any isolation level."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from chaz import AsyncChaz, Chaz, Conflict, InvalidEntry
from chaz.errors import ConfigurationError
from tests.fixtures.postgres import ScratchDatabase

ISOLATION = ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"]


def engine(database: ScratchDatabase) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(database.url.replace("postgresql:", "postgresql+psycopg:"))


def how_many(database: ScratchDatabase) -> int:
    return database.value("select count(*) from chaz.entries")


@pytest.mark.parametrize("isolation", ISOLATION)
def test_committed_it_happened(chaz: Chaz, database: ScratchDatabase, isolation: str) -> None:
    with database.connect(isolation=isolation) as mine:
        mine.execute("select 1")
        handle = chaz.session("s").direct("solo", "go", connection=mine)
        assert handle.state == "pending"
        assert not handle.ready()
        assert how_many(database) == 0
        mine.commit()
    assert how_many(database) == 1
    assert handle.state == "pending"
    assert chaz.result(handle.id) == handle


@pytest.mark.parametrize("isolation", ISOLATION)
def test_rolled_back_it_never_happened(chaz: Chaz, database: ScratchDatabase, isolation: str) -> None:
    with database.connect(isolation=isolation) as mine:
        handle = chaz.session("s").direct("solo", "go", connection=mine, idempotency_key="k")
        mine.rollback()
    assert how_many(database) == 0
    assert handle.state == "pending"
    assert chaz.session("s").direct("solo", "another", idempotency_key="k") == handle


def test_the_callers_row_factory_and_transaction_are_left_alone(chaz: Chaz, database: ScratchDatabase) -> None:
    with psycopg.connect(database.url) as mine:
        mine.execute("create table orders (id int)")
        chaz.session("s").say("an order has come", connection=mine)
        assert mine.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert mine.execute("select 1").fetchone() == (1,)
        mine.rollback()
    assert database.value("select to_regclass('orders')") is None


@pytest.mark.parametrize("isolation", ISOLATION)
def test_sqlalchemy_connection(chaz: Chaz, database: ScratchDatabase, isolation: str) -> None:
    made = engine(database)
    with made.connect().execution_options(isolation_level=isolation.replace("_", " ")) as mine:
        gone = chaz.session("s").direct("solo", "rolled back", connection=mine)
        mine.rollback()
        kept = chaz.session("s").direct(
            "solo", "kept: a colon :name and 100 %", connection=mine, metadata={"a": ":b"}, countdown=1
        )
        mine.commit()
    made.dispose()
    assert [entry.id for entry in chaz.session("s").entries()] == [kept.id]
    assert gone != kept


def test_sqlalchemy_session(chaz: Chaz, database: ScratchDatabase) -> None:
    made = engine(database)
    with orm.Session(made) as mine:
        chaz.session("s").direct("solo", "go", connection=mine)
        assert how_many(database) == 0
        mine.commit()
    made.dispose()
    assert how_many(database) == 1


def test_errors_are_chazs_own_on_the_callers_connection(chaz: Chaz, database: ScratchDatabase) -> None:
    session = chaz.session("s")
    session.say("go", idempotency_key="k")
    made = engine(database)
    with made.connect() as mine, pytest.raises(InvalidEntry, match="needs a text"):
        session.say("", connection=mine)
    with made.connect() as mine, pytest.raises(Conflict):
        session.say("another", idempotency_key="k", connection=mine)
    made.dispose()
    with database.connect() as mine, pytest.raises(Conflict):
        session.say("another", idempotency_key="k", connection=mine)


@pytest.mark.parametrize("wrong", ["postgresql://a-url", 7])
def test_what_is_no_connection_is_told(chaz: Chaz, wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a connection of psycopg or SQLAlchemy"):
        chaz.session("s").say("go", connection=wrong)


@pytest.mark.anyio
async def test_async_psycopg_connection(database: ScratchDatabase) -> None:
    async with (
        AsyncChaz(database.url) as chaz,
        await psycopg.AsyncConnection[tuple[Any, ...]].connect(database.url) as mine,
    ):
        await chaz.session("s").direct("solo", "rolled back", connection=mine)
        await mine.rollback()
        handle = await chaz.session("s").direct("solo", "kept", connection=mine)
        assert await handle.state() == "pending"
        await mine.commit()
        assert [entry.content async for entry in chaz.session("s").entries()] == ["kept"]
        with database.connect() as sync, pytest.raises(ConfigurationError, match="must be an async connection"):
            await chaz.session("s").say("go", connection=sync)


@pytest.mark.anyio
async def test_async_sqlalchemy_connection(database: ScratchDatabase) -> None:
    pytest.importorskip("greenlet", reason="SQLAlchemy's asyncio needs greenlet")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    made = create_async_engine(database.url.replace("postgresql:", "postgresql+psycopg:"))
    async with AsyncChaz(database.url) as chaz:
        async with made.connect() as mine:
            await chaz.session("s").direct("solo", "rolled back", connection=mine)
            await mine.rollback()
            await chaz.session("s").direct("solo", "kept", connection=mine)
            await mine.commit()
        async with AsyncSession(made) as mine:
            await chaz.session("s").direct("solo", "kept too", connection=mine)
            await mine.commit()
        assert [entry.content async for entry in chaz.session("s").entries()] == ["kept", "kept too"]
    await made.dispose()
