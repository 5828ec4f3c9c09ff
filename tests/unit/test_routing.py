"""Who a placed entry wakes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from chaz.entries import MAX_CONTENT, Author, EntryType, RunOptions
from chaz.routing import Noted, Refused, Roster, Wake, first_mentioned, route

TEAM = Roster(("writer", "reader", "web.search", "data-bot"), lead="writer")


def routed(
    content: str = "hello",
    *,
    type: EntryType = "message",
    author: Author = "human",
    recipient: str | None = None,
    options: object = None,
    roster: Roster = TEAM,
) -> Wake | Refused | Noted | None:
    return route(type=type, author=author, recipient=recipient, content=content, options=options, roster=roster)


# Who a message is for


@pytest.mark.parametrize(
    ("content", "agent"),
    [
        ("@reader", "reader"),
        ("@reader please", "reader"),
        ("please @reader, look", "reader"),
        ("please\n@reader", "reader"),
        ("(@reader)", "reader"),
        ("hello,@reader!", "reader"),
        ('"@reader"', "reader"),
        ("**@reader**", "reader"),
        ("@reader's turn", "reader"),
        ("ask @READER", "reader"),
        ("ask @Web.Search", "web.search"),
        ("ask @reader.", "reader"),
        ("ask @reader...", "reader"),
        ("ask @reader?!", "reader"),
        ("ask @reader: why", "reader"),
        ("ask @web.search.", "web.search"),
        ("ask @data-bot- or wait", "data-bot"),
        ("@reader and @data-bot", "reader"),
        ("@data-bot and @reader", "data-bot"),
        ("@nobody, @ada and @reader", "reader"),
        ("ada@example.com says: @reader", "reader"),
        ("see https://video.example/@data-bot, @reader", "reader"),
        ("see <https://video.example/>@reader", "reader"),
        ("`@data-bot` is not @reader", "reader"),
        ("`` ` `` @reader `@data-bot`", "reader"),
        ("a ` alone, @reader", "reader"),
        ("a ` alone\n\n@reader, and another ` there", "reader"),
        ("\\`@reader\\`", "reader"),
        ("```\n@data-bot\n```\n@reader", "reader"),
        ("~~~~\n@data-bot\n~~~\n@data-bot\n~~~~\n@reader", "reader"),
        ("```@data-bot``` and @reader", "reader"),
        ("- ```python\n  @data-bot\n  ```\n@reader", "reader"),
        ("> 10. * ```\n> @data-bot\n> - ```\n> @data-bot\n> ```\n@reader", "reader"),
    ],
)
def test_a_message_is_for_the_first_attached_agent_that_it_mentions(content: str, agent: str) -> None:
    assert routed(content) == Wake(agent)


@pytest.mark.parametrize(
    "content",
    [
        "reader",
        "@ reader",
        "@@reader",
        "@readers",
        "@reader_2",
        "@reader.de",
        "@web",
        "@nobody",
        "ada@reader",
        "ada@reader.example",
        "ada.b-c_@reader",
        "https://reader@git.example",
        "https://video.example/@reader",
        "https://video.example/?by=@reader",
        "https://video.example/?a=1&@reader",
        "https://video.example/#@reader",
        "mailto:@reader",
        "https://video.example/a,@reader",
        "(https://video.example/a;@reader)",
        "@reader@social.example",
        "say `@reader` to it",
        "say ``a ` @reader`` to it",
        "say `a\n@reader` to it",
        "```\n@reader\n```",
        "```python\n@reader\ndef f(): ...\n```\nThat is all.",
        "~~~\n@reader\n```\n@reader\n~~~",
        "````\n```\n@reader\n````",
        "> ```\n> @reader\n> ```",
        "   ```\n   @reader\n   ```",
        "```\n@reader is in what was never closed",
    ],
)
def test_what_is_no_mention_is_for_the_lead(content: str) -> None:
    assert routed(content) == Wake("writer")


@pytest.mark.parametrize(
    ("recipient", "content", "agent"),
    [
        ("reader", "hello", "reader"),
        ("Reader", "hello", "reader"),
        ("reader", "@data-bot", "reader"),
    ],
)
def test_a_recipient_goes_before_a_mention(recipient: str, content: str, agent: str) -> None:
    assert routed(content, recipient=recipient) == Wake(agent)


@pytest.mark.parametrize(("content", "agent"), [("hello", "writer"), ("@data-bot", "data-bot")])
def test_a_recipient_that_is_not_attached_is_redirected_and_the_log_says_so(content: str, agent: str) -> None:
    assert routed(content, recipient="ada") == Wake(
        agent, note=f"'ada' is not attached to this session; '{agent}' answers instead"
    )


def test_names_that_differ_in_case_only_are_told_apart() -> None:
    both = Roster(("Reader", "reader"), lead="reader")
    for name in both.agents:
        assert routed(recipient=name, roster=both) == Wake(name)
        assert routed(f"@{name}", roster=both) == Wake(name)


@pytest.mark.parametrize(
    ("roster", "expected"),
    [
        (Roster(("a", "b"), lead="b", default="c"), Wake("b")),
        (Roster(("a", "b"), default="c"), Wake("a")),
        (Roster(default="c"), Wake("c", attach=True)),
    ],
)
def test_with_nobody_named_it_is_for_lead_first_or_default(roster: Roster, expected: Wake) -> None:
    assert routed(roster=roster) == expected


def test_a_recipient_is_attached_where_nobody_is() -> None:
    assert routed(recipient="reader", roster=Roster(default="c")) == Wake("reader", attach=True)


def test_a_mention_attaches_nobody() -> None:
    assert routed("@reader", roster=Roster(default="c")) == Wake("c", attach=True)


@pytest.mark.parametrize("content", ["hello", "@reader"])
def test_with_nobody_at_all_a_note_says_what_to_do(content: str) -> None:
    noted = routed(content, roster=Roster())
    assert isinstance(noted, Noted)
    assert "CHAZ_DEFAULT_AGENT" in noted.why
    assert "directive" in noted.why


@pytest.mark.parametrize(
    ("content", "agent"),
    [
        ("@reader, please", "reader"),
        ("I, @writer, ask @Reader and @data-bot", "reader"),
        ("@WRITER", None),
        ("@ada and @nobody", None),
        ("run `@reader` or\n```\n@data-bot\n```", None),
        ("hello", None),
    ],
)
def test_an_agent_mentions_the_first_other_one(content: str, agent: str | None) -> None:
    assert first_mentioned(content, "writer", TEAM) == agent


@pytest.mark.parametrize("odd", ["`" * 9, "` ``", "@", "://", "```\n", "~~~\n", "@a.", "\\`", "> ", "- ", "1. "])
def test_a_long_text_is_read_in_one_go(odd: str) -> None:
    # What looked at a character once for each of the others would not come to an end within the time of a test.
    assert first_mentioned(odd * (MAX_CONTENT // len(odd)) + "\n\n", "writer", TEAM) is None


# What wakes


@pytest.mark.parametrize("author", ["human", "program"])
def test_a_message_of_a_human_or_a_program_wakes(author: Author) -> None:
    assert routed(author=author) == Wake("writer")


@pytest.mark.parametrize("author", ["agent", "system"])
@pytest.mark.parametrize("recipient", [None, "reader"])
def test_a_message_of_an_agent_or_the_system_wakes_nobody(author: Author, recipient: str | None) -> None:
    assert routed("@reader", author=author, recipient=recipient) is None
    assert routed(author=author, recipient=recipient, roster=Roster()) is None


@pytest.mark.parametrize("author", get_args(Author))
def test_a_directive_of_anybody_wakes_its_recipient_and_no_other(author: Author) -> None:
    assert routed("ask @data-bot", type="directive", author=author, recipient="reader") == Wake("reader")
    fresh = routed("ask @data-bot", type="directive", author=author, recipient="chef")
    assert fresh == Wake("chef", attach=True)


@pytest.mark.parametrize("author", get_args(Author))
@pytest.mark.parametrize(
    ("recipient", "roster", "agent"),
    [
        (None, TEAM, "writer"),
        ("Reader", TEAM, "reader"),
        ("reader", Roster(("reader",), default="chef"), "reader"),
        (None, Roster(("reader",), default="chef"), "reader"),
        (None, Roster(default="chef"), "chef"),
    ],
)
def test_who_summarises(author: Author, recipient: str | None, roster: Roster, agent: str) -> None:
    """Whoever asks; what the request says besides names nobody."""
    assert routed("@data-bot", type="compaction_request", author=author, recipient=recipient, roster=roster) == (
        Wake(agent)
    )


def test_another_summarises_where_the_one_named_is_not_attached() -> None:
    wake = routed(type="compaction_request", recipient="chef")
    assert isinstance(wake, Wake)
    assert (wake.agent, wake.attach) == ("writer", False)
    assert "'chef' is not attached" in wake.note


def test_where_nobody_is_a_request_to_summarise_is_noted() -> None:
    noted = routed(type="compaction_request", recipient="chef", roster=Roster())
    assert isinstance(noted, Noted)
    assert "nobody to summarise" in noted.why


@pytest.mark.parametrize("type", sorted({*get_args(EntryType)} - {"message", "directive", "compaction_request"}))
@pytest.mark.parametrize("author", get_args(Author))
def test_any_other_type_wakes_nobody(type: EntryType, author: Author) -> None:
    assert routed("@reader", type=type, author=author, recipient="reader") is None


# Options


@pytest.mark.parametrize("none", [None, {}])
def test_no_options_are_the_usual_ones(none: object) -> None:
    assert routed(options=none) == Wake("writer", options=RunOptions())


def test_options_are_handed_on() -> None:
    options = {"not_before": "2030-01-02T03:04:05+00:00", "timeout": 5, "priority": 7}
    expected = RunOptions(not_before=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC), timeout=5, priority=7)
    assert routed(options=options) == Wake("writer", options=expected)
    assert routed(type="directive", recipient="chef", options=options) == Wake("chef", True, expected)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"timeout": 0}, "metadata.options.timeout: "),
        ({"timeout": "soon"}, "(it is 'soon')"),
        ({"expires": "tomorrow"}, "metadata.options.expires: "),
        ({"colour": "red"}, "metadata.options.colour: "),
        ("soon", "metadata.options: "),
        (["soon"], "metadata.options: "),
        # These would overflow where they are stored.
        ({"timeout": "inf"}, "metadata.options.timeout: "),
        ({"timeout": 1e18}, "metadata.options.timeout: "),
        ({"priority": 10**10}, "metadata.options.priority: "),
    ],
)
def test_options_that_mean_nothing_are_refused_to_whoever_it_is_for(options: object, told: str) -> None:
    types: list[EntryType] = ["message", "directive"]
    for type in types:
        refused = routed(type=type, recipient="reader", options=options)
        assert isinstance(refused, Refused)
        assert refused.agent == "reader"
        assert told in refused.why


@pytest.mark.parametrize("options", [{"timeout": "x" * 2 * MAX_CONTENT}, {"x" * 2 * MAX_CONTENT: 1}])
def test_the_reason_of_a_refusal_fits_into_an_entry(options: dict[str, Any]) -> None:
    refused = routed(options=options)
    assert isinstance(refused, Refused)
    assert len(refused.why) <= MAX_CONTENT


def test_options_of_what_wakes_nobody_are_not_looked_at() -> None:
    assert routed(author="agent", options={"timeout": 0}) is None
    assert isinstance(routed(roster=Roster(), options={"timeout": 0}), Noted)


class Looked(tuple[str, ...]):
    """Agents, and how often they were gone through."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()

    def __contains__(self, name: object) -> bool:
        self.times += 1
        return super().__contains__(name)


def test_a_text_full_of_mentions_is_not_compared_with_every_agent_for_each() -> None:
    few, many = Looked(map(str, range(100))), Looked(map(str, range(100)))
    assert first_mentioned("@x " * 10, "solo", Roster(few)) is None
    assert first_mentioned("@x " * 10_000, "solo", Roster(many)) is None
    assert many.times == few.times
