"""Callbacks in the store: due with the run's end, taken by one, told at least once, given up after a day."""

from __future__ import annotations

from typing import Any

import pytest

from chaz import Chaz, InvalidEntry, outbox, sweeps
from chaz.callbacks import TaskCallback, Webhook
from chaz.doctor import callbacks
from chaz.outbox import End
from chaz.settings import Settings
from chaz.teller import Settled, Teller
from chaz.testing import eventually_async
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio

URL = "https://example.org/ends"
SIGNATURE: dict[str, Any] = {
    "task": "mine.store",
    "args": [None],
    "kwargs": {"x": None},
    "options": {"queue": "mine", "link_error": [{"task": "mine.failed"}]},
    "immutable": False,
}


async def test_nothing_is_due_before_the_end_and_all_of_it_then(stations: Stations, chaz: Chaz) -> None:
    run = chaz.session("s").direct("solo", "go", on_complete=SIGNATURE)
    await stations.place()
    claim = await stations.claim(run.id)
    assert await outbox.take(stations.database) == []
    await stations.end(claim, "42")
    assert (await sweeps.due(stations.database)).callbacks
    (end,) = await outbox.take(stations.database)
    assert (end.entry, end.run, end.state, end.result, end.succeeded) == (run.id, run.id, "succeeded", "42", True)
    assert isinstance(end.target, TaskCallback)
    assert end.target.success is not None
    assert (end.target.success["args"], end.target.success["kwargs"]) == ([None], {"x": None}), "nulls are kept"
    assert end.target.success["options"] == {"queue": "mine"}
    assert end.target.failure == ({"task": "mine.failed"},)

    assert await outbox.take(stations.database) == [], "who has taken it tells it"
    await outbox.told(stations.database, run.id)
    assert await stations.fetch("select from chaz.callbacks") == []


@pytest.mark.parametrize("state", ["failed", "cancelled"])
async def test_an_end_without_an_answer_is_told_as_such(stations: Stations, chaz: Chaz, state: str) -> None:
    run = chaz.session("s").direct("solo", "go", on_complete=SIGNATURE)
    await stations.place()
    await stations.end(await stations.claim(run.id), "no luck", state=state, reason="model")
    (end,) = await outbox.take(stations.database)
    assert (end.state, end.reason, end.result, end.succeeded) == (state, "model", "no luck", False)


async def test_each_end_is_told_for_itself(stations: Stations, chaz: Chaz, database: ScratchDatabase) -> None:
    one, two, three = [chaz.session(name).direct("solo", "go", on_complete=URL).id for name in "abc"]
    await stations.place()
    for run in (two, one, three):
        await stations.end(await stations.claim(run))
    assert [end.entry for end in await outbox.take(stations.database, limit=1)] == [two], "the first to end comes first"
    assert await outbox.take(stations.database, without=[one, three]) == [], "what is on its way is not taken again"
    with database.connect() as other:
        other.execute("select from chaz.callbacks where run_id = %s for update", (one,))
        assert [end.entry for end in await outbox.take(stations.database)] == [three], "another listener has it"
    assert [end.entry for end in await outbox.take(stations.database)] == [one]

    await outbox.not_told(stations.database, one, "refused")
    await outbox.told(stations.database, two)
    left = await stations.fetch("select run_id, last_error from chaz.callbacks order by run_id")
    assert {row["run_id"]: row["last_error"] for row in left} == {one: "refused", three: None}


async def test_a_message_that_another_run_took_is_told_with_that_one(stations: Stations, chaz: Chaz) -> None:
    one, two = [chaz.session("s").say(text, recipient="solo", on_complete=URL) for text in ("one", "two")]
    await stations.place()
    await stations.end(await stations.claim(one.id), "both")
    ends = {end.entry: end for end in await outbox.take(stations.database)}
    assert ends.keys() == {one.id, two.id}
    assert (ends[two.id].run, ends[two.id].result, ends[two.id].target) == (one.id, "both", Webhook(url=URL))


async def test_a_run_that_goes_on_all_the_same_is_told_later(stations: Stations, chaz: Chaz) -> None:
    run = chaz.session("s").direct("solo", "go", on_complete=URL)
    await stations.place()
    stations.scratch.query("update chaz.callbacks set ended_at = now(), due_at = now()")
    assert await outbox.take(stations.database) == []
    assert await stations.fetch("select tries, due_at from chaz.callbacks") == [{"tries": 0, "due_at": None}]
    await stations.end(await stations.claim(run.id))
    assert [end.entry for end in await outbox.take(stations.database)] == [run.id]


async def test_an_end_without_a_run_is_told_at_once(stations: Stations, chaz: Chaz) -> None:
    nobody = chaz.session("s").say("anybody?", on_complete=URL)
    await stations.place()
    (end,) = await outbox.take(stations.database)
    assert (end.entry, end.state, end.result, end.succeeded) == (nobody.id, "nobody", None, True)


async def test_a_message_that_a_busy_session_refuses_is_told_at_once(stations: Stations, chaz: Chaz) -> None:
    chaz.session("s").configure(on_message="reject")
    await stations.claimed("s")
    refused = chaz.session("s").say("and?", on_complete=URL)
    await stations.place()
    assert (await sweeps.due(stations.database)).callbacks
    (end,) = await outbox.take(stations.database)
    assert (end.entry, end.state, end.reason, end.succeeded) == (refused.id, "failed", "busy", False)


async def test_an_entry_of_another_tenant_than_its_sessions_is_told_at_once(
    stations: Stations, database: ScratchDatabase
) -> None:
    await stations.claimed("s")
    id = database.value(
        """
        insert into chaz.entries (tenant, session_id, type, sender, content, metadata)
        values ('other', chaz.session_id('s'), 'message', 'eve', 'hello',
            '{"options": {"on_complete": {"kind": "webhook", "url": "https://example.org/ends"}}}') returning id
        """
    )
    await stations.place()
    assert [(end.entry, end.state) for end in await outbox.take(stations.database)] == [(id, "nobody")]


async def test_it_is_tried_for_a_day_then_given_up_and_seen(
    stations: Stations, chaz: Chaz, database: ScratchDatabase
) -> None:
    run = chaz.session("s").direct("solo", "go", on_complete=URL)
    await stations.place()
    await stations.end(await stations.claim(run.id))
    settings = Settings(database_url=database.url)
    assert (await callbacks(stations.database, settings)).verdict == "ok"

    pauses: list[float] = []
    for _ in range(14):
        database.query("update chaz.callbacks set due_at = now()")
        assert [end.entry for end in await outbox.take(stations.database)] == [run.id]
        assert not await outbox.not_told(stations.database, run.id, "refused")
        pauses.append(database.value("select extract(epoch from due_at - now())::float8 from chaz.callbacks"))
    assert pauses[:6] == sorted(pauses[:6])
    assert 3500 < pauses[-1] <= 3600
    finding = await callbacks(stations.database, settings)
    assert (finding.verdict, "1 end could not" in finding.text, "refused" in finding.text) == ("warn", True, True)

    database.query("update chaz.callbacks set ended_at = now() - interval '25 hours'")
    assert await outbox.not_told(stations.database, run.id, "refused for good")
    database.query("update chaz.callbacks set due_at = now()")
    assert await outbox.take(stations.database) == []
    assert not (await sweeps.due(stations.database)).callbacks
    assert "1 given up after a day" in (await callbacks(stations.database, settings)).text


async def test_what_is_on_its_way_is_not_sent_again_until_it_is_settled(
    stations: Stations, chaz: Chaz, database: ScratchDatabase
) -> None:
    run = chaz.session("s").direct("solo", "go", on_complete=SIGNATURE).id
    await stations.place()
    await stations.end(await stations.claim(run))
    sent: list[tuple[End, Settled]] = []
    teller = Teller(
        Settings(database_url=database.url),
        stations.database,
        lambda ends, settled: sent.extend((end, settled) for end in ends),
    )
    assert await teller.tell()
    # It takes longer than anybody thought.
    database.query("update chaz.callbacks set due_at = now()")
    assert not await teller.tell()

    ((end, settled),) = sent
    settled(end, "refused")

    async def is_stored() -> bool:
        return database.value("select last_error from chaz.callbacks") == "refused"

    async def is_sent_again() -> bool:
        database.query("update chaz.callbacks set due_at = now()")
        return await teller.tell()

    await eventually_async(is_stored)

    await eventually_async(is_sent_again)
    settled(end, None)

    async def is_gone() -> bool:
        return database.value("select count(*) from chaz.callbacks") == 0

    await eventually_async(is_gone)
    assert [end.entry for end, _ in sent] == [run, run]
    teller.close()


@pytest.mark.parametrize(
    "wanted",
    ["ftp://x", "https://", {"task": object()}, {"kind": "carrier pigeon"}, 3, {"kind": "webhook", "url": "x"}],
)
async def test_what_is_no_callback_is_refused_at_the_door(chaz: Chaz, wanted: Any) -> None:
    with pytest.raises(InvalidEntry, match="on_complete"):
        chaz.session("s").direct("solo", "go", on_complete=wanted)


async def test_what_sql_lets_through_is_refused_by_placing(stations: Stations, database: ScratchDatabase) -> None:
    id = database.value(
        """
        select chaz.send('s', 'directive', 'cron', 'go', recipient => 'solo', on_complete => '{"kind": "pigeon"}')
        """
    )
    await stations.place()
    assert (await stations.run(id))["reason"] == "invalid"
