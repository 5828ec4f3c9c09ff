"""What a run sees of its session: all that it answers, however much was said since, and in every attempt the same."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from chaz import cancelling, requeueing, sessionlog
from chaz.aside import Aside
from chaz.entries import ENTRY_SIZE, session_id
from chaz.runs import Claim
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def view(stations: Stations, claim: Claim, room: int = sessionlog.ROOM) -> tuple[list[str], list[str]]:
    """Texts of the conversation so far, and of what the run answers."""
    conversation, triggers = await stations.transact(
        partial(
            sessionlog.context_entries,
            session_id=claim.session_id,
            run_id=claim.run_id,
            read_to=claim.read_to,
            room=room,
        )
    )
    return [entry.content for entry in conversation], [entry.content for entry in triggers]


def room_for(*texts: str) -> int:
    """Bytes for these entries."""
    return sum(len(text.encode()) + ENTRY_SIZE for text in texts)


async def summarise(stations: Stations, text: str, metadata: dict[str, Any]) -> int:
    """Append a summary to the session ``s``; its position."""

    async def append(tx: Any) -> int:
        await sessionlog.lock_head(tx, session_id("s"))
        return await sessionlog.append(
            tx,
            session_id=session_id("s"),
            tenant="",
            type="summary",
            sender="solo",
            author="agent",
            content=text,
            metadata=metadata,
        )

    return await stations.transact(append)


async def again(stations: Stations, claim: Claim) -> Claim:
    """The next attempt at the run."""
    await stations.give_back(claim)
    return await stations.claim(claim.run_id)


async def cancel(stations: Stations, *runs: Any) -> None:
    """Take back runs, as their senders do."""
    for run in runs:
        await stations.transact(partial(cancelling.request, run_id=run))
    await cancelling.walk(stations.database, aside=Aside())


async def test_no_metadata_is_read(stations: Stations) -> None:
    """It may be of any size, and no model is shown it."""
    large = {"payload": "x" * 100_000}
    await stations.end(await stations.claimed("s", "question", metadata=large))
    await summarise(stations, "so far", large | {"covers": 1})
    claim = await stations.claimed("s", "now", metadata=large)
    place: dict[str, Any] = {"session_id": claim.session_id, "run_id": claim.run_id, "read_to": claim.read_to}
    conversation, triggers = await stations.transact(lambda tx: sessionlog.context_entries(tx, **place))
    assert [entry.content for entry in [*conversation, *triggers]] == ["so far", "done", "now"]
    assert not any(entry.metadata for entry in [*conversation, *triggers])


async def test_the_newest_of_the_conversation_comes_before_what_is_answered(stations: Stations) -> None:
    for n in range(4):
        await stations.end(await stations.claimed("s", f"question {n}"), text=f"answer {n}")
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim, room_for("answer 2", "question 3", "answer 3")) == (
        ["answer 2", "question 3", "answer 3"],
        ["now"],
    )


async def test_its_own_trigger_is_never_the_one_that_is_cut(stations: Stations) -> None:
    busy = await stations.claimed("s", "first")
    own = await stations.send("s", "the instruction", priority=-5)
    others = [await stations.send("s", f"later {n}") for n in range(5)]
    await stations.place()
    await stations.end(busy)
    for other in others:
        await stations.end(await stations.claim(other))
    claim = await stations.claim(own)

    _, triggers = await view(stations, claim, room_for("the instruction"))

    assert triggers == ["the instruction"]


async def test_all_coalesced_messages_are_shown(stations: Stations) -> None:
    await stations.end(await stations.claimed("s", "hello"))
    busy = await stations.claimed("s", "busy")
    messages = [await stations.say("s", f"message {n}") for n in range(8)]
    await stations.place()
    await stations.end(busy)
    claim = await stations.claim(messages[0])

    conversation, triggers = await view(stations, claim, room_for("busy", "done"))

    assert triggers == [f"message {n}" for n in range(8)]
    assert conversation == ["busy", "done"]


async def test_what_waits_for_another_run_is_out_of_view(stations: Stations) -> None:
    claim = await stations.claimed("s", "mine")
    await stations.send("s", "somebody else's")
    await stations.place()

    assert await view(stations, claim) == ([], ["mine"])


@pytest.mark.parametrize("page", [1, 3, 500])
async def test_the_conversation_is_read_until_its_room_is_full(
    stations: Stations, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(sessionlog, "PAGE", page)
    for n in range(4):
        await stations.end(await stations.claimed("s", f"question {n}"), text="ä" * n)
    claim = await stations.claimed("s", "now")
    newest = ["question 2", "ää", "question 3", "äää"]

    assert await view(stations, claim, room_for(*newest)) == (newest, ["now"])
    assert await view(stations, claim, room_for(*newest) - 1) == (newest[1:], ["now"])
    assert await view(stations, claim, 0) == ([], ["… [cut: 3 characters, 0 kept]"])
    whole, _ = await view(stations, claim)
    assert len(whole) == 7


async def test_one_too_large_ends_the_conversation(stations: Stations) -> None:
    for text in ("small", "x" * 1000, "small too"):
        await stations.end(await stations.claimed("s", text), text="")
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim, 500) == (["small too"], ["now"])


async def test_triggers_larger_than_the_room_are_cut_and_share_it(stations: Stations) -> None:
    messages = [await stations.say("s", text, recipient="solo") for text in ("a" * 50, "b" * 3000, "ö" * 2000)]
    await stations.place()
    claim = await stations.claim(messages[0])

    _, triggers = await view(stations, claim, 2050)

    assert triggers == [
        "a" * 50,
        "b" * 1000 + "… [cut: 3000 characters, 1000 kept]",
        "ö" * 1000 + "… [cut: 2000 characters, 1000 kept]",
    ]


async def test_the_newest_summary_stands_for_what_it_covers(stations: Stations) -> None:
    await stations.end(await stations.claimed("s", "one"), text="uno")
    await summarise(stations, "older", {"covers": 1})
    (row,) = await stations.fetch("select max(position) as last from chaz.entries")
    await stations.end(await stations.claimed("s", "while it is written"), text="meanwhile")
    await summarise(stations, "uno was one", {"covers": row["last"]})
    claim = await stations.claimed("s", "now")

    seen = (["uno was one", "while it is written", "meanwhile"], ["now"])
    assert await view(stations, claim) == seen
    assert await view(stations, claim, 0) == (["uno was one"], ["… [cut: 3 characters, 0 kept]"])

    await summarise(stations, "too late for this run", {"covers": claim.read_to})
    assert await view(stations, await again(stations, claim)) == seen


@pytest.mark.parametrize("metadata", [{}, {"covers": None}, {"covers": "1"}, {"covers": -1}, {"covers": 1e30}])
async def test_a_summary_that_does_not_say_covers_all_before_it(stations: Stations, metadata: dict[str, Any]) -> None:
    await stations.end(await stations.claimed("s", "one"), text="uno")
    await summarise(stations, "so far", metadata)
    await stations.end(await stations.claimed("s", "two"), text="due")
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim) == (["so far", "two", "due"], ["now"])


async def test_a_trigger_is_answered_though_a_summary_covers_it(stations: Stations) -> None:
    busy = await stations.claimed("s", "busy")
    own = await stations.send("s", "mine")
    await stations.place()
    await summarise(stations, "so far", {})
    await stations.end(busy)
    claim = await stations.claim(own)

    assert await view(stations, claim) == (["so far", "done"], ["mine"])


async def test_what_failed_or_was_taken_back_before_is_a_part_of_the_conversation(stations: Stations) -> None:
    await stations.end(await stations.claimed("s", "failed"), "so it is", state="failed", reason="model")
    busy = await stations.claimed("s", "busy")
    await stations.place()
    back = await stations.send("s", "taken back")
    await stations.place()
    await cancel(stations, back)
    await stations.end(busy, text="")
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim) == (["failed", "busy", "taken back"], ["now"])


async def test_what_is_taken_back_or_runs_out_of_time_meanwhile_stays_out_of_view(stations: Stations) -> None:
    claim = await stations.claimed("s", "busy")
    own = await stations.send("s", "mine", priority=5)
    others = [await stations.send("s", text) for text in ("taken back", "goes on")]
    await stations.place()
    await stations.end(claim, text="")
    claim = await stations.claim(own)
    seen = (["busy"], ["mine"])
    assert await view(stations, claim) == seen

    await cancel(stations, others[0])

    assert await stations.state(others[0]) == "cancelled"
    assert await view(stations, await again(stations, claim)) == seen


async def test_a_coalesced_message_that_is_taken_back_meanwhile_stays_in_view(stations: Stations) -> None:
    messages = [await stations.say("s", f"from {sender}", sender=sender, recipient="solo") for sender in ("a", "b")]
    await stations.place()
    claim = await stations.claim(messages[0])
    seen: tuple[list[str], list[str]] = ([], ["from a", "from b"])
    assert await view(stations, claim) == seen

    await cancel(stations, messages[1])

    assert await stations.state(messages[1]) == "cancelled"
    assert await view(stations, await again(stations, claim)) == seen


async def test_what_a_requeued_run_is_to_answer_is_out_of_view_of_the_next(stations: Stations) -> None:
    messages = [await stations.say("s", f"from {sender}", sender=sender, recipient="solo") for sender in ("a", "b")]
    await stations.place()
    failed = await stations.claim(messages[0])
    await stations.end(failed, "it went wrong", state="failed", reason="model")
    busy = await stations.claimed("s", "busy")
    next_one = await stations.send("s", "now", priority=5)
    await stations.place()
    retry = await stations.transact(partial(requeueing.requeue, run_id=failed.run_id))
    await stations.end(busy, text="")
    claim = await stations.claim(next_one)

    assert await view(stations, claim) == (["busy"], ["now"])

    await cancel(stations, retry)
    assert await view(stations, await again(stations, claim)) == (["busy"], ["now"])


async def test_a_run_that_is_requeued_meanwhile_takes_nothing_out_of_view(stations: Stations) -> None:
    failed = await stations.claimed("s", "failed")
    await stations.end(failed, "it went wrong", state="failed", reason="model")
    claim = await stations.claimed("s", "now")
    assert await view(stations, claim) == (["failed"], ["now"])

    await stations.transact(partial(requeueing.requeue, run_id=failed.run_id))

    assert await view(stations, await again(stations, claim)) == (["failed"], ["now"])


async def test_a_run_for_later_is_out_of_view(stations: Stations) -> None:
    await stations.send("s", "tomorrow", countdown=timedelta(days=1))
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim) == ([], ["now"])
