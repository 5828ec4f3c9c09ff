"""Callbacks: what a producer names as ``on_complete``, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest

from chaz.callbacks import TaskCallback, Webhook, callback_of

FAILED: dict[str, Any] = {"task": "mine.failed", "args": [], "kwargs": {}}


def test_a_url_is_a_webhook() -> None:
    for url in ("http://hooks/x", "https://hooks.example.org:8443/x?y=1"):
        assert callback_of(url) == Webhook(url=url)
        assert callback_of({"kind": "webhook", "url": url}) == Webhook(url=url)


@pytest.mark.parametrize("errbacks", [FAILED, [FAILED], (FAILED,)])
def test_what_is_called_where_a_run_fails_leaves_the_signature_s_options(errbacks: object) -> None:
    given = {"task": "mine.store", "options": {"queue": "mine", "link_error": errbacks}}
    kept = callback_of(given)
    assert isinstance(kept, TaskCallback)
    # Else it was called again where the task itself fails, with that one's id.
    assert kept.success == {"task": "mine.store", "options": {"queue": "mine"}}
    assert kept.failure == (FAILED,)
    assert callback_of(kept.model_dump(mode="json")) == kept


REFUSED: list[Any] = [
    "",
    "file:///etc/passwd",
    "//hooks/x",
    "http:///x",
    "https://hooks/" + "x" * 2000,
    {"kind": "webhook", "url": "https://hooks/x", "method": "DELETE"},
    {"kind": "task", "success": None, "faliure": []},
    {"kind": "task", "success": "mine.store"},
    {"task": "mine.store", "options": {"link_error": "mine.failed"}},
    {"task": object()},
    None,
]


@pytest.mark.parametrize("wanted", REFUSED)
def test_what_is_no_callback_is_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match=": "):
        callback_of(wanted)
