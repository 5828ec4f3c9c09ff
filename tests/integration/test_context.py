"""What the model of a run is really shown: from the log in the database, by a worker, attempt after attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from chaz import Agent, cancelling
from chaz.aside import Aside
from chaz.errors import ModelUnavailable
from chaz.outcomes import Turn
from chaz.runtime.agents import Agents
from chaz.runtime.models import AssistantMessage, HistoryMessage, ToolSchema, UserMessage, register_provider
from chaz.runtime.tokens import estimate
from chaz.settings import Settings
from chaz.worker import WorkerProcess
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


class Recording:
    """A model that keeps what it is shown, and may be away at first."""

    def __init__(self) -> None:
        self.away = 0
        self.shown: list[list[HistoryMessage]] = []

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        self.shown.append(list(history))
        if self.away:
            self.away -= 1
            raise ModelUnavailable("recording", "away", 60)
        return Turn(text="done")

    @property
    def texts(self) -> list[list[str]]:
        """Of each turn, what it was shown."""
        return [
            [each.text if isinstance(each, UserMessage) else _own(each) for each in history] for history in self.shown
        ]


def _own(message: HistoryMessage) -> str:
    assert isinstance(message, AssistantMessage)
    return f"({message.turn.text})"


@pytest.fixture
def model() -> Recording:
    made = Recording()
    register_provider("recording", lambda _: made)
    return made


@pytest.fixture
def worker(database: ScratchDatabase, model: Recording) -> Iterator[WorkerProcess]:
    solo = Agent("solo", instructions="Lead.", model="recording:x", context_window=2_000, reserved_output=500)
    settings = Settings(database_url=database.url, broker_url="memory://", secrets="off")
    process = WorkerProcess(settings, Agents([solo]), name="test")
    process.start()
    yield process
    process.close()


async def test_as_much_of_a_long_session_as_the_window_holds(
    stations: Stations, worker: WorkerProcess, model: Recording
) -> None:
    for n in range(10):
        await stations.end(await stations.claimed("s", f"question {n} " + "x" * 600), text=f"answer {n}")
    run = await stations.say("s", "now", recipient="solo")
    await stations.place()

    await asyncio.to_thread(worker.execute, "solo", run)

    (texts,) = model.texts
    assert [text.split(" x")[0] for text in texts] == [
        *(text for n in range(6, 10) for text in (f"question {n}", f"(answer {n})")),
        "ada: now",
    ]
    assert sum(map(estimate, texts)) < 1_500 * 3 // 4
    assert await stations.state(run) == "succeeded"


async def test_the_next_attempt_is_shown_the_same_whatever_happened_meanwhile(
    stations: Stations, worker: WorkerProcess, model: Recording
) -> None:
    await stations.end(await stations.claimed("s", "first"), text="one")
    messages = [await stations.say("s", f"from {who}", sender=who, recipient="solo") for who in ("ada", "bob")]
    other = await stations.send("s", "another's")
    await stations.place()
    model.away = 1

    await asyncio.to_thread(worker.execute, "solo", messages[0])
    assert await stations.state(messages[0]) == "queued"
    for taken_back in (other, messages[1]):
        await stations.transact(partial(cancelling.request, run_id=taken_back))
    await cancelling.walk(stations.database, aside=Aside())
    await stations.say("s", "too late", recipient="solo")
    await stations.place()
    stations.scratch.query("update chaz.runs set not_before = null where id = %(id)s", id=messages[0])
    await asyncio.to_thread(worker.execute, "solo", messages[0])

    assert model.texts == [["first", "(one)", "ada: from ada", "bob: from bob"]] * 2
    assert [await stations.state(run) for run in (other, messages[1])] == ["cancelled", "cancelled"]
