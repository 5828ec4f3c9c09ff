"""A step of a chain: the directive that it sends under its own id, and what it leaves to be done after the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.exceptions import Ignore

from chaz import Chaz, backend, steps
from chaz.celery import app
from chaz.errors import InvalidEntry
from tests.fixtures.postgres import ScratchDatabase


@pytest.fixture
def producer(database: ScratchDatabase, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chaz]:
    """The producer of Celery's side of this process, on the test's database."""
    with Chaz(database.url) as chaz:
        monkeypatch.setattr(backend._Here, "chaz", chaz)  # pyright: ignore[reportPrivateUsage]
        yield chaz


def step(*previous: Any, request: dict[str, Any] | None = None, **options: Any) -> UUID:
    """Run the task as a worker does, with what a delivery says; the task's id, once the run has taken its place."""
    task = app.tasks[steps.Step.name]
    id = uuid4()
    task.push_request(**{"id": str(id), "called_directly": False} | (request or {}))
    try:
        with pytest.raises(Ignore, match=f"agent solo answers as run {task.request.id}"):
            task.run(*previous, agent="solo", **options)
        return UUID(task.request.id)
    finally:
        task.pop_request()


def callbacks(database: ScratchDatabase) -> list[Any]:
    return [
        row["on_complete"]
        for row in database.query("select metadata->'options'->'on_complete' as on_complete from chaz.entries")
    ]


def test_it_sends_one_directive_however_often_it_is_delivered(producer: Chaz, database: ScratchDatabase) -> None:
    id = step("a text", {"x": 1}, instruction="Read this.", session="s", timeout=7.0)
    assert step("a text", {"x": 1}, instruction="Read this.", session="s", timeout=7.0, request={"id": str(id)}) == id
    (entry,) = database.query("select * from chaz.entries")
    assert (entry["id"], entry["type"], entry["recipient"]) == (id, "directive", "solo")
    assert (entry["sender"], entry["author"]) == ("celery", "program")
    assert entry["content"] == 'Read this.\n\na text\n\n{"x": 1}'
    assert entry["metadata"]["options"]["timeout"] == 7
    assert entry["session_id"] == producer.session("s").id


def test_steps_of_one_chain_share_a_session_unless_they_name_one(producer: Chaz, database: ScratchDatabase) -> None:
    root = str(uuid4())
    for _ in range(2):
        step("a", request={"root_id": root})
    alone = step("a")
    sessions = {producer.session(f"celery {name}").id for name in (root, alone)}
    assert {row["session_id"] for row in database.query("select session_id from chaz.entries")} == sessions


def test_what_follows_is_kept_as_celery_would_call_it(producer: Chaz, database: ScratchDatabase) -> None:
    last, then = app.signature("mine.last"), app.signature("mine.then", kwargs={"x": 1})
    # In Celery's order: what comes first is last.
    waits = {"chain": [dict(last), dict(then)], "errbacks": [dict(app.signature("mine.failed"))]}
    id = step("a", request={**waits, "root_id": "root"})
    (kept,) = callbacks(database)
    assert [one["task"] for one in kept["failure"]] == ["mine.failed"]
    success = kept["success"]
    assert (success["task"], success["kwargs"]) == ("mine.then", {"x": 1})
    assert [one["task"] for one in success["options"]["chain"]] == ["mine.last"]
    assert (success["options"]["parent_id"], success["options"]["root_id"]) == (str(id), "root")


def test_links_are_called_beside_the_rest_of_the_chain(producer: Chaz, database: ScratchDatabase) -> None:
    links = [dict(app.signature("mine.one")), dict(app.signature("mine.two"))]
    step("a", request={"callbacks": links[:1]})
    step("a", request={"callbacks": links, "chain": [dict(app.signature("mine.then"))]})
    step("a")
    by_task = {kept["success"] and kept["success"]["task"]: kept["success"] for kept in callbacks(database)}
    assert by_task.keys() == {"mine.one", "celery.group", None}
    assert [one["task"] for one in by_task["celery.group"]["kwargs"]["tasks"]] == ["mine.one", "mine.two", "mine.then"]


def test_a_chord_s_header_is_refused(producer: Chaz, database: ScratchDatabase) -> None:
    task = app.tasks[steps.Step.name]
    task.push_request(id=str(uuid4()), chord={"task": "mine.body"})
    with pytest.raises(InvalidEntry, match="a chord's header"):
        task.run(agent="solo")
    task.pop_request()
    assert database.query("select from chaz.entries") == []
