"""PostgreSQL: a pool whose transactions are retried whole, a LISTEN that comes back, errors in chaz's words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, LiteralString, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, AsyncCursor, IsolationLevel, errors, sql
from psycopg.abc import PQGen
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from chaz.errors import (
    ChazError,
    Conflict,
    DatabaseTooOld,
    DatabaseUnavailable,
    InvalidEntry,
    NotPermitted,
    SchemaError,
    UnknownRequest,
    UnknownRun,
    UnknownSession,
)
from chaz.settings import without_secrets

T = TypeVar("T")
V = TypeVar("V")
Transaction = AsyncConnection[DictRow]
Cursor = AsyncCursor[DictRow]
Row = Mapping[str, Any]

OLDEST_SERVER = 14
CONNECT_TIMEOUT = 10
IDLE_FOR = 1.0

# Serialization failure, deadlock, lock not available: another transaction was in the way, and the same may pass now.
RETRIED = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)

REFUSED = (InvalidEntry, psycopg.Error)
"""What a statement raises that PostgreSQL will not carry out."""

SILENCE = 30.0
"""Seconds without an answer after which a connection counts as lost."""


def translated(error: psycopg.Error, address: str) -> ChazError | None:
    """The error in chaz's words, or None where it has none."""
    message = (error.diag.message_primary or str(error)).strip()
    match error.sqlstate:
        case "CZ001":
            return InvalidEntry(message)
        case "CZ002":
            return Conflict(UUID(error.diag.message_detail), error.diag.message_hint or "content")
        case "CZ003":
            return UnknownSession(error.diag.message_detail or message)
        case "CZ005":
            return UnknownRun(error.diag.message_detail or message)
        case "CZ006":
            return UnknownRequest(error.diag.message_detail or message)
        case "42501":
            return NotPermitted(message, error.diag.message_hint or "grant it the right")
        case "3F000" | "42P01" | "42883" | "42703":
            return SchemaError(
                f"the schema chaz at {address} is missing or not of this version ({message.splitlines()[0]})"
            )
        case _:
            pass
    if isinstance(error, errors.CheckViolation | errors.CharacterNotInRepertoire | errors.DataError):
        return InvalidEntry(message)
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return DatabaseUnavailable(address, " ".join(str(error).split()))
    if (error.sqlstate or "").startswith(("08", "25P03", "28", "3D", "53", "57P")):
        return DatabaseUnavailable(address, message)
    return None


@contextmanager
def chaz_errors(address: str = "the given connection") -> Generator[None]:
    """Raise psycopg's errors of this block in chaz's words, where it has any."""
    try:
        yield
    except psycopg.Error as error:
        if found := translated(error, address):
            raise found from error
        raise


class Connection(AsyncConnection[DictRow]):
    """A connection that is lost when the server has owed an answer for ``silence`` seconds.

    TCP notices dropped packets, but not a server, a pooler or a proxy that is frozen and still acknowledges them.
    """

    silence = SILENCE
    _given_up = False

    async def wait(self, gen: PQGen[V], *how: Any, **options: Any) -> V:
        timer = asyncio.get_running_loop().call_later(self.silence, self._give_up)
        try:
            return await super().wait(gen, *how, **options)
        except psycopg.OperationalError as error:
            if self._given_up:
                raise psycopg.OperationalError(f"no answer for {self.silence:g} s") from error
            raise
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._given_up = True
        _cut(self)


class BlockingConnection(psycopg.Connection[DictRow]):
    """The same, for a thread of its own."""

    silence = SILENCE
    _given_up = False

    def wait(self, gen: PQGen[V], *how: Any, **options: Any) -> V:
        timer = threading.Timer(self.silence, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            return super().wait(gen, *how, **options)
        except psycopg.OperationalError as error:
            if self._given_up:
                raise psycopg.OperationalError(f"no answer for {self.silence:g} s") from error
            raise
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._given_up = True
        _cut(self)


def _cut(connection: Connection | BlockingConnection) -> None:
    """Shut the socket down under libpq, which then sees its end. A cancel would wait for the server's word."""
    with (
        contextlib.suppress(OSError, psycopg.OperationalError),
        socket.socket(fileno=os.dup(connection.fileno())) as other,
    ):
        other.shutdown(socket.SHUT_RDWR)


class Database:
    """A process's pool of connections to chaz's database. Open it on the loop that uses it."""

    def __init__(
        self,
        url: str,
        *,
        size: int = 10,
        name: str = "chaz",
        rings: bool = True,
        lock_timeout: str = "5s",
        retries: int = 20,
        silence: float = SILENCE,
    ) -> None:
        """``rings=False``: what is committed here rings no doorbell; for a listener, which looks by itself.

        ``lock_timeout`` is PostgreSQL's; ``retries`` is how often a transaction is tried when another is in its way;
        ``silence`` is how many seconds an answer may take before the connection counts as lost.
        """
        self.address = without_secrets(url)
        self._url = url
        self._name = name
        self._size = size
        self._rings = rings
        self._lock_timeout = lock_timeout
        self._retries = retries
        self._silence = silence
        self._pool: AsyncConnectionPool[Transaction] | None = None
        self._opening = asyncio.Lock()
        self._used: WeakKeyDictionary[Transaction, float] = WeakKeyDictionary()
        self.server_version = 0

    async def open(self) -> Database:
        """Connect. Raises DatabaseUnavailable, DatabaseTooOld; the pool then reconnects by itself."""
        async with self._opening:
            if self._pool is not None:
                return self
            # The pool reports a refused login as a time-out only, so the first connection is made by hand.
            with chaz_errors(self.address):
                async with await connect(self._url, self._name, silence=self._silence) as connection:
                    self.server_version = connection.info.server_version
            if self.server_version < OLDEST_SERVER * 10_000:
                raise DatabaseTooOld(self.address, self.server_version // 10_000, OLDEST_SERVER)
            pool = AsyncConnectionPool[Transaction](
                self._url,
                name=self._name,
                connection_class=Connection,
                kwargs={"row_factory": dict_row, **connection_options(self._name, self._silence)},
                configure=self._configure,
                check=self._check,
                min_size=1,
                max_size=self._size,
                timeout=CONNECT_TIMEOUT,
                # The waits between its tries double, and the next caller begins anew: none is long.
                reconnect_timeout=CONNECT_TIMEOUT / 2,
                open=False,
            )
            await pool.open()
            self._pool = pool
            return self

    async def close(self) -> None:
        """Give all connections back."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _configure(self, connection: Transaction) -> None:
        cast("Connection", connection).silence = self._silence
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        await connection.execute(sql.SQL("set lock_timeout = {}").format(sql.Literal(self._lock_timeout)))
        # A process that is stopped in the middle of a transaction does not keep its rows from the others for ever.
        silence = sql.Literal(f"{max(1, int(self._silence * 1000))}ms")
        await connection.execute(sql.SQL("set idle_in_transaction_session_timeout = {}").format(silence))
        if not self._rings:
            await connection.execute("set chaz.bell = 'off'")
        await connection.commit()

    async def _check(self, connection: Transaction) -> None:
        """Ask a connection that was idle for a while whether it still lives: after a restart it does not."""
        now = time.monotonic()
        if now - self._used.get(connection, 0.0) > IDLE_FOR:
            # Not the pool's own check: cancelled in it, a connection goes back to the pool in autocommit mode, and
            # what should have been one transaction is then as many as it has statements.
            await connection.execute("select 1")
            await connection.rollback()
        self._used[connection] = now

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Transaction]:
        """A connection of the pool, in a transaction that commits at the end. Errors are in chaz's words."""
        if self._pool is None:
            await self.open()
        assert self._pool is not None
        with chaz_errors(self.address):
            try:
                async with self._pool.connection() as connection:
                    yield connection
            except (PoolTimeout, PoolClosed) as error:
                raise DatabaseUnavailable(self.address, f"no connection ({error})") from error

    async def transact(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run ``work`` in a READ COMMITTED transaction, again and whole when another one was in its way.

        Raises what ``work`` raises, and DatabaseUnavailable.
        """
        for attempt in range(self._retries):
            try:
                async with self.connection() as transaction:
                    return await work(transaction)
            except RETRIED:
                if attempt == self._retries - 1:
                    raise
                await asyncio.sleep(random.uniform(0, min(0.01 * 2**attempt, 1.0)))
        raise AssertionError("unreachable")

    async def fetch(self, query: LiteralString, parameters: Mapping[str, Any] | None = None) -> list[DictRow]:
        """The rows of one query in a transaction of its own."""

        async def work(transaction: Transaction) -> list[DictRow]:
            # In a pipeline BEGIN and the query are one round trip.
            async with transaction.pipeline():
                cursor = await transaction.execute(query, parameters)
            return await cursor.fetchall()

        return await self.transact(work)


def connection_options(name: str, silence: float = SILENCE) -> dict[str, Any]:
    """psycopg's parameters of every connection of chaz."""
    return {
        "application_name": name,
        "connect_timeout": CONNECT_TIMEOUT,
        # Few statements, asked again and again, and slow to plan: prepared when they come for the second time.
        "prepare_threshold": 1,
        # Dropped packets are noticed in the same time, whether an answer is owed or not.
        "keepalives_idle": max(1, int(silence / 2)),
        "keepalives_interval": max(1, int(silence / 6)),
        "keepalives_count": 3,
        "tcp_user_timeout": max(1000, int(silence * 1000)),
    }


async def connect(url: str, name: str, *, autocommit: bool = False, silence: float = SILENCE) -> Connection:
    """A connection outside the pool. Raises psycopg's errors."""
    connection = await Connection.connect(
        url, autocommit=autocommit, row_factory=dict_row, **connection_options(name, silence)
    )
    connection.silence = silence
    return connection


def connect_blocking(
    url: str, name: str, *, connect_timeout: int = CONNECT_TIMEOUT, silence: float = SILENCE
) -> BlockingConnection:
    """An autocommit connection for a thread of its own. Raises psycopg's errors."""
    options: dict[str, Any] = {**connection_options(name, silence), "connect_timeout": connect_timeout}
    connection = BlockingConnection.connect(url, autocommit=True, row_factory=dict_row, **options)
    connection.silence = silence
    return connection


class Subscription:
    """A LISTEN on a connection of its own. Whoever uses it connects, looks, and only then waits:

    what commits before the LISTEN is found by looking, what commits after it is notified.
    """

    def __init__(
        self, url: str, channels: Sequence[str], *, name: str = "chaz-listen", silence: float = SILENCE
    ) -> None:
        self.address = without_secrets(url)
        self._url = url
        self._channels = channels
        self._name = name
        self._silence = silence
        self._connection: Connection | None = None

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    async def connect(self) -> None:
        """LISTEN on a new connection. Raises DatabaseUnavailable."""
        await self.close()
        with chaz_errors(self.address):
            connection = await connect(self._url, self._name, autocommit=True, silence=self._silence)
            try:
                for channel in self._channels:
                    await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
            except BaseException:
                await connection.close()
                raise
        self._connection = connection

    async def wait(self, timeout: float) -> list[str]:
        """The payloads that came, as soon as one comes; empty after ``timeout`` seconds.

        Raises DatabaseUnavailable when the connection is lost; then :meth:`connect` again.
        """
        if self._connection is None:
            raise DatabaseUnavailable(self.address, "not connected")
        with chaz_errors(self.address):
            # No answer is owed while it waits.
            self._connection.silence = timeout + self._silence
            try:
                return [notify.payload async for notify in self._connection.notifies(timeout=timeout, stop_after=1)]
            finally:
                self._connection.silence = self._silence

    async def probe(self) -> None:
        """Ask the server something, so that a dead connection is noticed. Raises DatabaseUnavailable."""
        if self._connection is None:
            raise DatabaseUnavailable(self.address, "not connected")
        with chaz_errors(self.address):
            await self._connection.execute("select 1")

    async def close(self) -> None:
        """Stop listening."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
