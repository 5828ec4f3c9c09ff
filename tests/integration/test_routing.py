"""What placing makes of an entry: a run, a note, an error; and who is attached by it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from chaz import Chaz, RunFailed
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def attached(stations: Stations) -> list[tuple[str, bool]]:
    rows = await stations.fetch("select agent, lead from chaz.attachments order by attached_at, agent")
    return [(row["agent"], row["lead"]) for row in rows]


def insert(database: ScratchDatabase, session: UUID, **fields: Any) -> UUID:
    """A plain INSERT, as any program can make it."""
    return database.query(
        """
        insert into chaz.entries (session_id, type, sender, recipient, content, metadata) values
            (%(session)s, %(type)s, 'etl', %(recipient)s, 'hi', %(metadata)s::jsonb) returning id
        """,
        **{"session": session, "type": "directive", "recipient": "solo", "metadata": "{}"} | fields,
    )[0]["id"]


async def test_a_directive_attaches_its_recipient_and_the_first_is_the_lead(stations: Stations) -> None:
    await stations.send("s", "go", recipient="child")
    await stations.send("s", "go", recipient="solo")
    await stations.send("s", "go", recipient="child")
    await stations.place()
    assert await attached(stations) == [("child", True), ("solo", False)]


@pytest.mark.parametrize(
    ("text", "recipient", "agent"),
    [
        ("hello", None, "child"),
        ("hello @solo", None, "solo"),
        ("hello @Solo.", None, "solo"),
        ("mail ada@solo", None, "child"),
        ("@nobody but @solo", None, "solo"),
        ("hello @solo", "child", "child"),
        ("hello", "solo", "solo"),
    ],
)
async def test_whom_a_message_is_for(stations: Stations, text: str, recipient: str | None, agent: str) -> None:
    for name in ("child", "solo"):
        await stations.send("s", "go", recipient=name)
    run = await stations.say("s", text, recipient=recipient)
    await stations.place()
    assert (await stations.run(run))["agent"] == agent


async def test_the_default_agent_answers_where_nobody_is(stations: Stations) -> None:
    run = await stations.say("s")
    await stations.place(default_agent="solo")
    assert (await stations.run(run))["agent"] == "solo"
    assert await attached(stations) == [("solo", True)]


async def test_a_message_to_nobody_is_noted_and_its_handle_is_ready(stations: Stations, chaz: Chaz) -> None:
    handle = chaz.session("s").say("is anybody there?")
    await stations.place()
    (_, note) = await stations.log("s")
    assert (note.type, note.position) == ("note", 2)
    assert "nobody to answer" in note.content
    assert note.metadata == {"entry": str(handle.id)}
    assert handle.state == "nobody"
    assert handle.ready()
    assert handle.get(timeout=5) is None


async def test_an_agent_that_mentions_itself_wakes_nobody(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s")
    await stations.end(claim, "@solo go on!")
    await stations.place()
    (row,) = await stations.fetch("select count(*) from chaz.runs")
    assert row["count"] == 1


async def test_one_run_is_active_and_the_others_wait(stations: Stations, database: ScratchDatabase) -> None:
    runs = [await stations.send("s", str(number)) for number in range(3)]
    placed = await stations.place()
    assert [publication.delivery.run for publication in placed.publications] == [runs[0]]
    assert [await stations.state(run) for run in runs] == ["queued", "pending", "pending"]
    # The constraint behind the rule.
    with pytest.raises(psycopg.errors.UniqueViolation):
        database.query("update chaz.runs set state = 'queued' where id = %(id)s", id=runs[1])


async def test_a_run_of_nobody_known_is_made_and_not_published(stations: Stations) -> None:
    run = await stations.send("s", recipient="ghost")
    placed = await stations.place()
    assert placed.publications == []
    assert await stations.state(run) == "queued"


async def test_a_publication_says_where_to_and_in_what_order(stations: Stations) -> None:
    runs = [await stations.send(f"s{n}", priority=n) for n in range(3)]
    placed = await stations.place()
    assert {(p.delivery.run, p.queue, p.priority) for p in placed.publications} == {
        (run, "solo", n) for n, run in enumerate(runs)
    }


async def test_a_run_that_is_to_start_later_is_pending_and_in_nobodys_way(stations: Stations) -> None:
    run = await stations.send("s", countdown=timedelta(hours=1))
    assert (await stations.place()).publications == []
    assert await stations.state(run) == "pending"
    await stations.end(await stations.claimed("s", "now"))
    assert await stations.state(run) == "pending"
    row = await stations.run(run)
    assert row["publish_after"] == row["not_before"]
    assert row["deadline"] == row["not_before"] + timedelta(hours=1)


async def test_a_run_ends_by_the_earliest_of_all_deadlines(stations: Stations) -> None:
    await stations.register("hasty", timeout=timedelta(minutes=5))
    by_agent = await stations.send("a", recipient="hasty")
    by_producer = await stations.send("b", recipient="hasty", timeout=timedelta(minutes=1))
    await stations.place()
    for run, minutes in ((by_agent, 5), (by_producer, 1)):
        row = await stations.run(run)
        assert abs(row["deadline"] - row["created_at"] - timedelta(minutes=minutes)) < timedelta(seconds=1)


BAD_OPTIONS: dict[str, Any] = {
    "unknown": {"colour": "red"},
    "no object": 7,
    "a word": {"timeout": "soon"},
    "negative": {"timeout": -1},
    "no instant": {"not_before": "tomorrow"},
    "no number": {"priority": None},
    "past any clock": {"timeout": 1e300},
    "past any date": {"timeout": 1e13},
    "past any integer": {"priority": 10**12},
    "past any entry": {"timeout": "x" * 1_100_000},
    "before any date": {"not_before": "0001-01-01T00:00:00+14:00"},
    "the last day": {"not_before": "9999-12-31T23:59:59+00:00"},
    "no time zone": {"not_before": "2030-01-01T00:00:00"},
}


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
async def test_bad_options_fail_their_run_and_stop_nobody(
    stations: Stations, database: ScratchDatabase, chaz: Chaz, options: object
) -> None:
    session, other = uuid4(), uuid4()
    before = insert(database, session)
    bad = insert(database, session, metadata=json.dumps({"options": options}))
    after = insert(database, session)
    elsewhere = insert(database, other)

    await stations.place()

    assert [await stations.state(run) for run in (before, bad, after, elsewhere)] == [
        "queued",
        "failed",
        "pending",
        "queued",
    ]
    rows = await stations.fetch("select * from chaz.entries where type = 'error'")
    assert [(row["run_id"], row["session_id"]) for row in rows] == [(bad, session)]
    assert "options" in rows[0]["content"]
    with pytest.raises(RunFailed, match="invalid"):
        chaz.result(bad).get(timeout=5)


async def test_what_nothing_waits_for_is_noted(stations: Stations, database: ScratchDatabase) -> None:
    await stations.send("s", "yes", type="compaction_request", recipient=None)
    database.query(
        """
        insert into chaz.entries (session_id, type, sender, content, metadata)
        select session_id, 'approval_decision', 'ada', '', '{"request": 7, "decision": []}' from chaz.entries
        """
    )
    await stations.place()
    assert [entry.type for entry in await stations.log("s")] == [
        *("compaction_request", "approval_decision", "note", "note")
    ]


async def test_only_the_spawning_directive_has_a_parent(stations: Stations, database: ScratchDatabase) -> None:
    claim, (child,) = await stations.spawning("s")
    run = await stations.run(child)
    later = insert(database, run["session_id"])
    await stations.place()

    assert (run["parent_run_id"], run["root_run_id"], run["depth"]) == (claim.run_id, claim.run_id, 1)
    other = await stations.run(later)
    assert (other["parent_run_id"], other["root_run_id"], other["depth"]) == (None, claim.run_id, 1)


async def test_a_child_session_ends_no_later_than_its_parent(stations: Stations) -> None:
    claim = await stations.claimed("s", recipient="parent", timeout=timedelta(minutes=1))
    await stations.step(claim)
    child = await stations.spawn(claim)
    await stations.place()
    assert (await stations.run(child))["deadline"] <= (await stations.run(claim.run_id))["deadline"]
