"""Wire formats: the JSON that other versions, running side by side, read and write.

A file that changes is a change of format: make it one that the version before can read, or a new version.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chaz.deliveries import AuditBatch, AuditEvent, RunDelivery
from chaz.entries import Entry, RunOptions
from chaz.outcomes import CallOutcome, Turn

FORMATS: dict[str, type[BaseModel]] = {
    "run_delivery.json": RunDelivery,
    "run_delivery_child.json": RunDelivery,
    "audit_event_call.json": AuditEvent,
    "audit_event_result.json": AuditEvent,
    "audit_batch.json": AuditBatch,
    "entry.json": Entry,
    "entry_unplaced.json": Entry,
    "run_options.json": RunOptions,
    "turn.json": Turn,
    "turn_answer.json": Turn,
    "call_outcome.json": CallOutcome,
}


def golden(name: str) -> Any:
    return json.loads((Path(__file__).parent / name).read_text("utf-8"))


def test_every_golden_file_is_checked() -> None:
    assert {file.name for file in Path(__file__).parent.glob("*.json")} == {*FORMATS, "audit_chain.json"}


@pytest.mark.parametrize(("name", "format"), FORMATS.items())
def test_the_format_is_that_of_the_golden_file(name: str, format: type[BaseModel]) -> None:
    assert format.model_validate(golden(name)).model_dump(mode="json") == golden(name)


@pytest.mark.parametrize(("name", "format"), FORMATS.items())
def test_every_field_is_in_a_golden_file(name: str, format: type[BaseModel]) -> None:
    assert set(golden(name)) == set(format.model_fields)


def test_a_turn_is_kept_whatever_the_model_wrote() -> None:
    # As the journal stores it: in ASCII, so that NUL and lone surrogates survive.
    turn = Turn.model_validate(golden("turn.json"))
    stored = json.dumps(turn.model_dump(mode="json"), ensure_ascii=True)
    assert stored.isascii()
    assert Turn.model_validate(json.loads(stored)) == turn
    assert turn.text == "let me look \0 \ud800"


def test_a_newer_listeners_delivery_is_understood() -> None:
    known = golden("run_delivery.json")
    assert RunDelivery.model_validate({**known, "priority": 3}) == RunDelivery.model_validate(known)


def test_a_delivery_needs_its_run() -> None:
    for name in ("run", "agent", "session"):
        with pytest.raises(ValidationError):
            RunDelivery.model_validate({k: v for k, v in golden("run_delivery.json").items() if k != name})


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("kind", "run"), ("more", 1), ("events", ["x"])])
def test_an_audit_batch_of_another_format_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        AuditBatch.model_validate({**golden("audit_batch.json"), field: value})


def test_the_digest_of_a_run_is_a_chain_over_canonical_bodies() -> None:
    chain = golden("audit_chain.json")
    events = AuditBatch.model_validate(golden("audit_batch.json")).events
    assert [event.body for event in events] == chain["bodies"]
    digest = b""
    for body in chain["bodies"]:
        digest = hashlib.sha256(digest + body.encode()).digest()
    assert digest.hex() == chain["digest"]


def test_a_body_leaves_out_the_place_only() -> None:
    event = AuditEvent.model_validate(golden("audit_event_result.json"))
    elsewhere = event.model_copy(update={"position": 99, "seq": 98, "at": event.at + timedelta(1)})
    assert elsewhere.body == event.body
    changes: dict[str, object] = {
        "kind": "tool_call",
        "run": event.session,
        "step": 8,
        "ordinal": 8,
        "call_id": "other",
        "tool": "other",
        "attempt": 8,
        "outcome": "error",
        "content": "other",
    }
    assert len({event.body, *(event.model_copy(update={key: value}).body for key, value in changes.items())}) == 10
