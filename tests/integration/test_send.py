"""The one door: what is refused, what is the same again, and sending inside the caller's own transaction."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from chaz import Chaz, Conflict, InvalidEntry, UnknownRun, UnknownSession
from chaz.entries import MAX_CONTENT, derived_id, session_id
from tests.fixtures.postgres import ScratchDatabase, both_servers

NOWHERE = UUID("00000000-0000-4000-8000-000000000000")


def sent(database: ScratchDatabase) -> list[dict[str, Any]]:
    return database.query("select * from chaz.entries order by arrival")


def options(database: ScratchDatabase) -> dict[str, Any]:
    return database.value("select metadata->'options' from chaz.entries")


BAD_INPUT: list[tuple[Callable[[Any], object], str]] = [
    (lambda s: s.send("tool_call", "hi"), "cannot send an entry of type 'tool_call'"),
    (lambda s: s.send("shout", "hi"), "cannot send an entry of type 'shout'"),
    (lambda s: s.send("ack", "hi"), "it may send: compaction_request, directive, message"),
    (lambda s: s.say(""), "a message needs a text"),
    (lambda s: s.say(" \r\n\t"), "a message needs a text"),
    (lambda s: s.direct("solo", ""), "a directive needs a text"),
    (lambda s: s.say("x" * (MAX_CONTENT + 1)), "holds 1048576 characters at most, and this one has 1048577"),
    (lambda s: s.send("directive", "hi"), "a directive needs a recipient"),
    (lambda s: s.direct("", "hi"), "a recipient has 1 to 200 characters, not 0"),
    (lambda s: s.direct("a" * 201, "hi"), "a recipient has 1 to 200 characters, not 201"),
    (lambda s: s.direct("so\0lo", "hi"), "NUL"),
    (lambda s: s.say("hi", author="agent"), "a producer is a human or a program, not 'agent'"),
    (lambda s: s.say("hi", author="god"), "a producer is a human or a program, not 'god'"),
    (lambda s: s.say("hi", metadata={"options": {}}), "are chaz's own"),
    (lambda s: s.say("hi", metadata={"session": "other"}), "are chaz's own"),
    (lambda s: s.say("hi", metadata={"a": "\0"}), "Unicode"),
    (lambda s: s.say("hi", timeout=0), "a timeout is more than 0 s"),
    (lambda s: s.say("hi", timeout=-1), "a timeout is more than 0 s"),
    (lambda s: s.say("hi", timeout=1e9), "at most ten years"),
    (lambda s: s.say("hi", priority=1001), "a priority is between -1000 and 1000"),
    (lambda s: s.say("hi", countdown=1, eta=datetime.now(UTC)), "a countdown or an eta, not both"),
    (lambda s: s.say("hi", eta=datetime(2030, 1, 1)), "eta has no time zone"),
    (lambda s: s.say("hi", expires=datetime(2030, 1, 1)), "expires has no time zone"),
    (lambda s: s.say("hi", id=uuid4(), idempotency_key="k"), "an id or an idempotency key, not both"),
    (lambda s: s.say("hi", colour="red"), "unknown option 'colour'"),
]


@pytest.mark.parametrize(("what", "why"), BAD_INPUT)
def test_bad_input_is_refused_and_nothing_is_stored(
    chaz: Chaz, database: ScratchDatabase, what: Callable[[Any], object], why: str
) -> None:
    with pytest.raises(InvalidEntry) as refused:
        what(chaz.session("s"))
    assert why in str(refused.value)
    assert sent(database) == []


def test_a_session_is_named_in_one_way(chaz: Chaz) -> None:
    for name in ("", "n" * 201):
        with pytest.raises(InvalidEntry, match="has 1 to 200 characters"):
            chaz.session(name)
    with pytest.raises(InvalidEntry, match="not both"):
        chaz.session("s", id=NOWHERE)


def test_an_unknown_session_or_run_is_an_error(chaz: Chaz, database: ScratchDatabase) -> None:
    for session in (chaz.session(id=NOWHERE), chaz.session(str(NOWHERE))):
        with pytest.raises(UnknownSession, match=str(NOWHERE)):
            session.say("hi")
        with pytest.raises(UnknownSession):
            list(session.entries())
    with pytest.raises(UnknownSession, match="never-sent-to"):
        list(chaz.session("never-sent-to").entries())
    for run in (NOWHERE, "no uuid"):
        with pytest.raises(UnknownRun):
            chaz.result(run)
    assert sent(database) == []


def test_text_that_postgresql_cannot_hold_is_made_safe(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").say("a\0b \ud83d c", sender="a\0da")
    (entry,) = sent(database)
    assert entry["content"] == "a\ufffdb \ufffd c"
    assert entry["sender"] == "a\ufffdda"


def test_a_text_of_just_the_limit_is_kept_whole(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").say("ü" * MAX_CONTENT)
    assert database.value("select length(content) from chaz.entries") == MAX_CONTENT


def test_a_fresh_session_exists_at_once(chaz: Chaz) -> None:
    session = chaz.session()
    session.say("one")
    chaz.session(id=session.id).say("two")
    assert [entry.content for entry in session.entries()] == ["one", "two"]


@both_servers
def test_python_and_sql_derive_the_same_ids(database: ScratchDatabase) -> None:
    for words in (("session", "", "weekly report"), ("entry", "ü€😀", "a\nb"), ("k", "s", "'\"\\")):
        kind, scope, name = words
        by_sql = database.value("select chaz.derived_id(%(k)s, %(s)s, %(n)s)", k=kind, s=scope, n=name)
        assert by_sql == derived_id(*words)
        assert by_sql.version == 8
    assert database.value("select chaz.session_id('s', 'acme')") == session_id("s", "acme")


@both_servers
def test_new_ids_are_version_7_and_grow(database: ScratchDatabase) -> None:
    ids = [database.value("select chaz.new_id()") for _ in range(5)]
    assert [id.version for id in ids] == [7] * 5
    assert [id.int >> 80 for id in ids] == sorted(id.int >> 80 for id in ids)


# The same again


def test_the_same_again_is_the_same_entry(chaz: Chaz, database: ScratchDatabase) -> None:
    first = chaz.session("s").direct("solo", "go", idempotency_key="monday", metadata={"a": 1}, countdown=5)
    again = chaz.session("s").direct("solo", "go", idempotency_key="monday", metadata={"a": 1}, countdown=5)
    elsewhere = chaz.session("t").direct("solo", "go", idempotency_key="monday", metadata={"a": 1})

    assert again == first
    assert elsewhere != first
    assert len(sent(database)) == 2


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"content": "stop"}, "content"),
        ({"recipient": "child"}, "recipient"),
        ({"sender": "bob"}, "sender"),
        ({"author": "human"}, "author"),
        ({"metadata": {"a": 2}}, "metadata or options"),
        ({"priority": 1}, "metadata or options"),
        ({"timeout": 7}, "metadata or options"),
        ({"type": "message"}, "type"),
    ],
)
@pytest.mark.parametrize("key", [{"idempotency_key": "monday"}, {"id": NOWHERE}])
def test_another_body_is_a_conflict(
    chaz: Chaz, database: ScratchDatabase, change: dict[str, Any], differs: str, key: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"type": "directive", "content": "go", "recipient": "solo", "sender": "ada"}
    first = chaz.session("s").send(**body, **key)
    with pytest.raises(Conflict, match=f"exists with another {differs}") as conflict:
        chaz.session("s").send(**(body | change), **key)
    assert conflict.value.args[0] == first.id
    assert len(sent(database)) == 1


def test_an_id_used_in_another_session_is_a_conflict(chaz: Chaz) -> None:
    chaz.session("s").say("go", id=NOWHERE)
    with pytest.raises(Conflict, match="another session"):
        chaz.session("t").say("go", id=NOWHERE)


@both_servers
def test_of_twenty_at_once_with_one_key_there_is_one_entry(database: ScratchDatabase) -> None:
    with Chaz(database.url) as chaz, ThreadPoolExecutor(20) as pool:

        def submit(_: int) -> UUID:
            return chaz.session("s").direct("solo", "go", idempotency_key="k", sender="ada").id

        ids = set(pool.map(submit, range(20)))
    assert len(ids) == 1
    assert len(sent(database)) == 1


# Options


def test_options_travel_with_the_entry(chaz: Chaz, database: ScratchDatabase) -> None:
    eta = datetime(2040, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    chaz.session("s").direct("solo", "go", eta=eta, expires=eta, timeout=timedelta(minutes=2), priority=-3)
    found = options(database)
    assert datetime.fromisoformat(found.pop("not_before")) == eta
    assert datetime.fromisoformat(found.pop("expires")) == eta
    assert found == {"timeout": 120, "priority": -3}


def test_relative_times_count_from_the_send(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").direct("solo", "go", countdown=60, expires=3600)
    (entry,) = sent(database)
    found = options(database)
    for option, seconds in (("not_before", 60), ("expires", 3600)):
        ahead = datetime.fromisoformat(found[option]) - entry["created_at"]
        assert abs(ahead.total_seconds() - seconds) < 2


def test_no_option_leaves_no_trace(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").direct("solo", "go", metadata={"mine": True})
    (entry,) = sent(database)
    assert entry["metadata"] == {"mine": True, "session": "s"}
    assert [entry.metadata for entry in chaz.session("s").entries()] == [{"mine": True}]


@both_servers
def test_psql_says_the_same_in_one_line(database: ScratchDatabase) -> None:
    id = database.value("select chaz.send('weekly', 'directive', 'cron', 'Find …', recipient => 'researcher')")
    (entry,) = sent(database)
    assert (entry["id"], entry["session_id"], entry["recipient"]) == (id, session_id("weekly"), "researcher")
    with pytest.raises(psycopg.Error, match="a message needs a text"):
        database.value("select chaz.send('weekly', 'message', 'cron', null)")
