"""Entries: derived ids, text made safe, options of a run, and the allow-lists."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args
from uuid import RFC_4122, UUID

import pytest
from pydantic import ValidationError

from chaz.entries import (
    FROM_PRODUCERS,
    IN_CONTEXT,
    MAX_CONTENT,
    Bookmark,
    EntryType,
    RunOptions,
    derived_id,
    safe_text,
    session_id,
)


# The values were given by PostgreSQL's chaz.derived_id.
@pytest.mark.parametrize(
    ("kind", "scope", "name", "expected"),
    [
        ("session", "", "weekly-report", "b8e5ff4c-d2be-8053-a2f7-508ec2d2246a"),
        ("session", "acme", "weekly-report", "bef02b75-b488-8ac1-83cf-c4014f78176a"),
        ("audit", "0190a5b2-0000-7000-8000-000000000001", "7", "91a51a29-8c31-852e-ad5d-5602525e6716"),
        ("entry", "", "clé 🗝", "2748e68f-c803-8aba-a69a-7f04f61672b0"),
    ],
)
def test_a_derived_id_is_the_one_that_postgresql_derives(kind: str, scope: str, name: str, expected: str) -> None:
    found = derived_id(kind, scope, name)
    assert found == UUID(expected)
    assert (found.version, found.variant) == (8, RFC_4122)


def test_words_do_not_run_into_each_other() -> None:
    alike = [("a", "bc", ""), ("ab", "c", ""), ("a", "b", "c"), ("", "a", "bc")]
    assert len({derived_id(*words) for words in alike}) == 4


def test_the_id_of_a_named_session_is_of_its_tenant() -> None:
    assert session_id("weekly-report") == derived_id("session", "", "weekly-report")
    assert session_id("weekly-report", "acme") == derived_id("session", "acme", "weekly-report")


@pytest.mark.parametrize(
    "text", ["", "plain", "tab\tand\r\nlines", "naïve 中文", "👩\u200d👧 \U0010ffff", "\x01\x7f\ufffe"]
)
def test_what_postgresql_can_hold_stays_as_it_is(text: str) -> None:
    assert safe_text(text) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\0b\0", "a�b�"),
        ("a\ud800b", "a�b"),
        ("\udc00", "�"),
        ("\udc00\ud800", "��"),
        ("\ud83d\ude00", "😀"),  # two halves that make a whole
        ("😀\ud83d\0😀", "😀��😀"),
    ],
)
def test_what_postgresql_cannot_hold_is_replaced(text: str, safe: str) -> None:
    assert safe_text(text) == safe
    assert safe_text(text).encode()


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\0", "\ud800"])
@pytest.mark.parametrize("limit", [60, 100, 999])
def test_a_long_text_is_cut_with_a_mark_and_never_over_the_limit(letter: str, limit: int) -> None:
    cut = safe_text(letter * 1000, limit)
    assert len(cut) == limit
    assert cut.startswith(safe_text(letter) * 3)
    assert cut.endswith(f"… [cut: 1000 characters, {limit} kept]")
    assert safe_text(letter * limit, limit) == safe_text(letter) * limit


@pytest.mark.parametrize("limit", [1, 10, 30])
def test_a_limit_shorter_than_the_mark_holds_too(limit: int) -> None:
    assert len(safe_text("x" * 1000, limit)) <= limit


def test_the_limit_is_an_entrys_unless_another_is_given() -> None:
    assert len(safe_text("x" * (MAX_CONTENT + 1))) == MAX_CONTENT
    assert safe_text("x" * MAX_CONTENT) == "x" * MAX_CONTENT


def test_options_are_read_from_json() -> None:
    given: dict[str, Any] = {
        "not_before": "2030-01-02T03:04:05+00:00",
        "expires": "2030-01-02T04:04:05Z",
        "timeout": 90,
        "priority": -3,
    }
    assert RunOptions.model_validate(given) == RunOptions(
        not_before=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        expires=datetime(2030, 1, 2, 4, 4, 5, tzinfo=UTC),
        timeout=90.0,
        priority=-3,
    )
    assert RunOptions.model_validate({}) == RunOptions(not_before=None, expires=None, timeout=None, priority=0)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -1.5},
        {"timeout": "soon"},
        {"timeout": "nan"},
        # What a timedelta, an interval or a column cannot hold would stop the placing of the whole session.
        {"timeout": "inf"},
        {"timeout": 1e18},
        {"priority": 10**10},
        {"priority": 1.5},
        {"priority": None},
        {"not_before": "tomorrow"},
        {"expires": []},
        {"deadline": 3},
        "timeout",
        ["timeout"],
    ],
)
def test_options_that_mean_nothing_are_refused(options: object) -> None:
    with pytest.raises(ValidationError):
        RunOptions.model_validate(options)


def test_allow_lists_name_types_that_exist() -> None:
    assert set(get_args(EntryType)) >= IN_CONTEXT | FROM_PRODUCERS
    assert {"message", "directive", "summary"} == IN_CONTEXT
    assert {"message", "directive", "compaction_request"} == FROM_PRODUCERS


def test_a_bookmark_is_a_line_of_text() -> None:
    run = UUID(int=12)
    assert str(Bookmark(7, {run: 2})) == f"7,{run.hex}:2"
    for mark in (Bookmark(), Bookmark(3), Bookmark(7, {run: 2, UUID(int=5): 0})):
        assert Bookmark.parse(str(mark)) == mark


@pytest.mark.parametrize("text", ["", "x", "1,2", "1,2:3", "1,:"])
def test_what_is_no_bookmark_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place in a log"):
        Bookmark.parse(text)
