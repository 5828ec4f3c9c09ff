"""Many submits of one request at once: one entry, one run and one answer, before its end and after."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest

from chaz import AsyncChaz, Chaz, Conflict
from chaz.result import AsyncAgentResult
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.processes import Processes
from tests.fixtures.races import RACES, deadlocks

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

AT_ONCE = 20
SEND = "select chaz.send('s', 'directive', 'ada', %s, recipient => 'solo', idempotency_key => %s) as id"


def test_one_request_is_one_run_with_one_answer(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    wanted = script(calls(call("record_effect", name="once")), answer("the only one"))
    with Chaz(database.url) as chaz, ThreadPoolExecutor(AT_ONCE) as pool:

        def submit(_: int) -> tuple[UUID, str | None]:
            handle = chaz.session("s").direct("solo", wanted, idempotency_key="k", sender="ada")
            return handle.id, handle.get(timeout=30)

        first = set(pool.map(submit, range(AT_ONCE)))
        assert {answer for _, answer in first} == {"the only one"}
        assert len(first) == 1
        # It is over: the same again is the same run, with the same answer at once.
        assert set(pool.map(submit, range(AT_ONCE))) == first
        with pytest.raises(Conflict, match="another content"):
            chaz.session("s").direct("solo", "another body", idempotency_key="k", sender="ada")
        assert chaz.session("s").direct("solo", script(answer("later")), sender="ada").get(timeout=30) == "later"
    assert database.value("select count(*) from effects") == 1
    assert database.value("select count(*) from chaz.runs") == 2
    assert database.value("select count(*) from chaz.entries where type = 'directive'") == 2


@pytest.mark.anyio
@both_servers
async def test_of_two_bodies_at_once_one_wins_and_the_other_is_a_conflict(database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz:
        session = chaz.session("s")
        for race in range(RACES):
            bodies = [f"body {n % 2}" for n in range(AT_ONCE)]
            came_to = await asyncio.gather(
                *(session.direct("solo", body, idempotency_key=f"k{race}", sender="ada") for body in bodies),
                return_exceptions=True,
            )
            assert Counter(map(type, came_to)) == {AsyncAgentResult: AT_ONCE // 2, Conflict: AT_ONCE // 2}
            winners = {body for body, one in zip(bodies, came_to, strict=True) if isinstance(one, AsyncAgentResult)}
            ids = {one.id for one in came_to if isinstance(one, AsyncAgentResult)}
            assert (len(winners), len(ids)) == (1, 1)
            rows = database.query("select content from chaz.entries where id = %(id)s", id=ids.pop())
            assert [row["content"] for row in rows] == [*winners]
    assert database.value("select count(*) from chaz.entries") == RACES
    assert deadlocks(database) == 0


@both_servers
@pytest.mark.parametrize("commits", [True, False])
def test_a_key_in_an_open_transaction_is_waited_for(database: ScratchDatabase, commits: bool) -> None:
    with database.connect() as one, database.connect() as two, ThreadPoolExecutor(1) as pool:
        first = one.execute(SEND, ["go", "k"]).fetchone()
        waiting = pool.submit(lambda: two.execute(SEND, ["go", "k"]).fetchone())
        database.until_blocked()
        one.commit() if commits else one.rollback()
        # The id comes from the key, so that it is the same in any case.
        assert waiting.result(10) == first
        two.commit()
    assert database.value("select count(*) from chaz.entries") == 1
