"""What a model is shown where its window does not hold all: in budget, in order, valid, and the same in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import get_args
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaz.entries import Author, Entry, EntryType, cut_mark, fair_share
from chaz.outcomes import ToolCall, Turn
from chaz.runtime.context import Conversation, conversation_of, spoken
from chaz.runtime.delimiting import delimited, undelimited
from chaz.runtime.models import AssistantMessage, HistoryMessage, ToolMessage, UserMessage
from chaz.runtime.models.openai import messages_of
from chaz.runtime.tokens import MESSAGE, Count, estimate, frame_tokens
from chaz.runtime.window import OLD_RESULT, Window

MARK = estimate(cut_mark(10**6, 10**6))
properties = settings(deadline=None, database=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def refused(history: Sequence[HistoryMessage]) -> str:
    """Why the strictest of the providers would refuse this history; empty, if none would."""
    if not history or not isinstance(history[0], UserMessage):
        return "it does not begin with a user's message"
    if isinstance(history[-1], AssistantMessage):
        return "it ends with the model's own words"
    open_calls: list[str] = []
    for message in history:
        if isinstance(message, ToolMessage):
            if not open_calls or open_calls.pop(0) != message.call_id:
                return f"the result of {message.call_id} answers no call right before it"
        elif open_calls:
            return f"the calls {open_calls} have no result"
        elif isinstance(message, AssistantMessage):
            open_calls = [call.id for call in message.turn.calls]
            if not message.turn.text.strip() and not open_calls:
                return "a turn is empty"
        if isinstance(message, UserMessage) and not message.text.strip():
            return "a text is empty"
        if isinstance(message, ToolMessage) and not message.content.strip():
            return "a result is empty"
    if open_calls:
        return f"the calls {open_calls} have no result"
    roles = [message["role"] for message in messages_of("", history)]
    alike = [role for role, following in pairwise(roles) if role == following and role != "tool"]
    return f"two of {alike} are neighbours" if alike else ""


def tokens(history: Sequence[HistoryMessage], count: Count = estimate) -> int:
    """What a history comes to, counted whole."""
    return sum(
        frame_tokens(message, count)
        + (count(message.text) if isinstance(message, UserMessage) else 0)
        + (count(message.content) if isinstance(message, ToolMessage) else 0)
        for message in history
    )


def entry(content: str, type: EntryType, sender: str, author: Author) -> Entry:
    return Entry(
        id=UUID(int=1),
        session_id=UUID(int=2),
        position=1,
        seq=0,
        type=type,
        sender=sender,
        author=author,
        recipient=None,
        content=content,
        metadata={},
        run_id=None,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


texts: st.SearchStrategy[str] = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", " \n"]),
    st.builds(str.__mul__, st.text(min_size=1, max_size=8), st.integers(1, 300)),
)
entries = st.builds(
    entry,
    texts,
    st.sampled_from(["message", "message", *get_args(EntryType)]),
    st.sampled_from(["ada", "lead"]),
    st.sampled_from(["agent", *get_args(Author)]),
)
asked = st.builds(
    entry, texts, st.sampled_from(["message", "directive"]), st.sampled_from(["ada", "lead"]), st.just("human")
)


@st.composite
def steps(draw: st.DrawFn) -> list[list[HistoryMessage]]:
    """What each step of a run adds: its turn with calls, their results, and what was said meanwhile."""
    found: list[list[HistoryMessage]] = []
    for step in range(draw(st.integers(0, 5))):
        results = draw(st.lists(texts, min_size=1, max_size=3))
        calls = tuple(ToolCall(id=f"{step}.{n}", tool="t", arguments="{}") for n in range(len(results)))
        said = spoken(draw(st.lists(asked, max_size=2)))
        shown = [
            ToolMessage(call_id=call.id, tool="t", content=delimited(result, call.id))
            for call, result in zip(calls, results, strict=True)
        ]
        found.append([AssistantMessage(turn=Turn(calls=calls)), *shown, *said])
    return found


def is_cut(shown: str, whole: str) -> bool:
    head, mark, _ = shown.partition("… [cut: ")
    return bool(mark) and whole.startswith(head)


@properties
@given(st.lists(entries, max_size=25), st.lists(asked, max_size=3), steps(), st.integers(100, 3000))
def test_any_history_is_valid_in_budget_in_order_and_holds_what_is_asked(
    log: list[Entry], triggers: list[Entry], steps: list[list[HistoryMessage]], room: int
) -> None:
    conversation = conversation_of("lead", log, triggers)
    window, replay = (Window(conversation, estimate, room) for _ in range(2))
    kept = [*([conversation.summary] if conversation.summary else []), *conversation.asked]
    for added in [[], *steps]:
        window.add(added)
        replay.add(added)
        kept += added
        # Frames, and a mark for each text, are shown however small the room is.
        least = sum(tokens([cut_to_nothing(message)]) + MARK for message in kept)
        shown = window.show()

        assert refused(shown) == ""
        assert window.tokens == pytest.approx(tokens(shown), abs=2 * len(shown))  # a text is counted in two parts
        assert replay.show() == shown
        if least <= room * 3 // 4:
            assert window.tokens <= room
        behind = shown[len(shown) - len(kept) + bool(conversation.summary) :]
        begun = shown[: len(shown) - len(behind)]
        earlier = begun[1:] if conversation.summary else begun
        assert earlier == list(conversation.earlier[len(conversation.earlier) - len(earlier) :])
        whole = kept[bool(conversation.summary) :]
        for message, original in zip(behind, whole, strict=True):
            assert message == original or is_cut(text_of(message), text_of(original))
        if conversation.summary:
            first = shown[0]
            assert first == conversation.summary or is_cut(text_of(first), conversation.summary.text)


def text_of(message: HistoryMessage) -> str:
    if isinstance(message, UserMessage):
        return message.text
    return undelimited(message.content) if isinstance(message, ToolMessage) else message.turn.text


def cut_to_nothing(message: HistoryMessage) -> HistoryMessage:
    if isinstance(message, UserMessage):
        return UserMessage(text="")
    return message if isinstance(message, AssistantMessage) else message.model_copy(update={"content": "x" * 90})


@properties
@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 5000))
def test_a_fair_share_fits_and_wastes_nothing(sizes: list[int], room: int) -> None:
    most = fair_share(sizes, room)
    given_out = sum(min(size, most) for size in sizes)
    assert given_out <= room or most == 0
    assert given_out == sum(sizes) or room - given_out < len(sizes)


def user(text: str) -> UserMessage:
    return UserMessage(text=text)


def said(text: str) -> AssistantMessage:
    return AssistantMessage(turn=Turn(text=text))


def call(id: str, result: str) -> list[HistoryMessage]:
    turn = Turn(calls=(ToolCall(id=id, tool="t", arguments="{}"),))
    return [AssistantMessage(turn=turn), ToolMessage(call_id=id, tool="t", content=delimited(result, id))]


def words(text: str) -> int:
    """A tokenizer: a word is a token."""
    return len(text.split())


def test_the_oldest_of_the_conversation_goes_first_and_whole() -> None:
    earlier = [user("one " * 50), said("two " * 50), user("three " * 50), said("four " * 50)]
    conversation = Conversation((user("now"),), tuple(earlier))
    all_of_it = 4 * (50 + MESSAGE) + 1 + MESSAGE

    assert Window(conversation, words, all_of_it).show() == [*earlier, user("now")]
    # Into three quarters, two would fit; the model's own words are nothing to begin with.
    assert Window(conversation, words, all_of_it - 1).show() == [*earlier[2:], user("now")]
    assert Window(conversation, words, 240).show() == [*earlier[2:], user("now")]
    assert Window(conversation, words, 160).show() == [user("now")]


def test_a_summary_is_kept_and_the_models_own_words_may_follow_it() -> None:
    earlier = [user("one " * 50), said("two " * 50)]
    window = Window(Conversation((user("now"),), tuple(earlier), user("so far")), words, 120)

    assert window.show() == [user("so far"), earlier[1], user("now")]


def test_nothing_is_fitted_again_until_it_has_to_be() -> None:
    earlier = tuple(user(f"{n} " * 42) for n in range(10))
    window = Window(Conversation((user("now"),), earlier), words, 509)
    assert len(window.show()) == 11

    window.add(call("a", "result"))
    after = window.show()
    assert len(after) == 6 + 1 + 2  # of the conversation six, in three quarters

    window.add(call("b", "word " * 50))
    assert window.show()[: len(after)] == after
    window.add(call("c", "word " * 60))
    assert len(window.show()) < len(after) + 4


def test_older_results_are_cut_before_newer_ones_and_before_what_is_asked() -> None:
    long = "word " * 400
    window = Window(Conversation((user("now " * 300),), (user("earlier"),)), words, 1000)
    window.add(call("a", long))
    window.show()
    window.add(call("b", long))
    shown = window.show()

    assert shown[0] == user("now " * 300)
    old, new = (text_of(each) for each in shown if isinstance(each, ToolMessage))
    assert is_cut(old, long)
    assert words(old) <= OLD_RESULT
    assert "[cut: 2000 characters" in old
    assert new == long
    assert window.tokens <= 1000


def test_if_that_is_not_enough_the_longest_are_cut_whatever_they_are() -> None:
    window = Window(Conversation((user("short"), user("asked " * 900)), (), user("so far " * 50)), words, 800)
    window.add(call("a", "result " * 900))
    shown = window.show()

    assert [text_of(each)[:6] for each in shown] == ["so far", "short", "asked ", "", "result"]
    assert shown[1] == user("short")
    assert ["[cut: " in text_of(each) for each in shown] == [False, False, True, False, True]
    assert window.tokens <= 600
    # It is still data, between its delimiters.
    result = shown[-1]
    assert isinstance(result, ToolMessage)
    assert undelimited(result.content) != result.content


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("abc", 1), ("abcd", 2), ("слово", 5), ("漢字", 3), ("😀", 2), ("\ud800", 2)],
)
def test_an_estimate_is_by_bytes(text: str, tokens: int) -> None:
    assert estimate(text) == tokens
