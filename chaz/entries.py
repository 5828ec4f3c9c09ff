"""Entries: the immutable rows of a session's log, and the two allow-lists that give them their meaning."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from chaz.callbacks import Callback

EntryType = Literal[
    "message",
    "directive",
    "summary",
    "tool_call",
    "tool_result",
    "ack",
    "error",
    "note",
    "approval_request",
    "approval_decision",
    "compaction_request",
]
OnMessage = Literal["coalesce", "each", "reject", "interrupt", "steer"]
"""What a message does that comes while its session is busy."""
SecretsPolicy = Literal["redact", "block", "off"]
"""What is done with a secret that is about to leave a worker."""

Author = Literal["human", "program", "agent", "system"]

# Allow-lists: a new type is neither until it is named here.
IN_CONTEXT: frozenset[EntryType] = frozenset({"message", "directive", "summary"})
FROM_PRODUCERS: frozenset[EntryType] = frozenset({"message", "directive", "compaction_request"})
"""What may be sent. A decision is sent by ``chaz.decide``."""

ENTRY_SIZE = 32
"""Bytes that an entry is thought to take in a model's context besides its content: its speaker, its frame."""
MAX_CONTENT = 1_048_576
"""The most characters that an entry holds. A producer's longer text is refused, an agent's or tool's is cut."""


class Entry(BaseModel):
    """One row of a session's log, as everybody sees it."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["entry"] = "entry"
    id: UUID
    session_id: UUID
    position: int | None
    """None while no listener has placed it."""
    seq: int
    """0, but for tool calls and results: they stand at their run's ack, and count on."""
    type: EntryType
    sender: str
    author: Author
    recipient: str | None
    content: str
    metadata: dict[str, Any]
    """What its writer said besides.

    The ``error`` that closes a run has its ``state``, ``reason`` (a word) and ``agent``; of a cancelled run also
    ``cancelled_by``, ``cancel_reason`` (their words, or empty) and, where it was cancelled along with the run that had
    spawned it, that ``parent``.
    """
    run_id: UUID | None
    """The run that wrote it."""
    created_at: datetime
    bookmark: str | None = None
    """Where a reader is that has read this entry: give it, or the entry, as ``after`` to go on from here."""


@dataclass(frozen=True)
class Ended:
    """Of a run that has ended: the position of its last ``ack``, and how many audit events it had to tell."""

    last_ack: int
    events: int


@dataclass(frozen=True)
class Bookmark:
    """How far a log has been read: up to a position, and of each run that may still tell, up to a seq without a gap.

    A position alone does not say which audit entries have been read: they stand at their run's ``ack``, and come late.
    """

    position: int = 0
    told: Mapping[UUID, int] = field(default_factory=dict[UUID, int])
    """Runs whose audit trail has not been read to its end, and how far it has been."""

    def __str__(self) -> str:
        return "".join((str(self.position), *(f",{run.hex}:{seq}" for run, seq in self.told.items())))

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """The bookmark that was printed so; a bare position is one too. Raises ValueError."""
        try:
            position, *runs = text.split(",")
            told = dict(run.split(":") for run in runs)
            return cls(int(position), {UUID(run): int(seq) for run, seq in told.items()})
        except ValueError:
            raise ValueError(
                f"{text!r} is no place in a log; give a position, an entry or an entry's bookmark"
            ) from None

    @classmethod
    def of(cls, place: Place) -> Bookmark:
        """The bookmark of a place. Raises ValueError."""
        if isinstance(place, Entry):
            return cls.parse(place.bookmark) if place.bookmark else cls(place.position or 0)
        return cls.parse(str(place))

    def moved_over(self, entries: Iterable[Entry], ended: Mapping[UUID, Ended]) -> Iterator[tuple[Entry, Bookmark]]:
        """Each entry with the bookmark behind it, given the runs that have ended."""
        position, told = self.position, dict(self.told)
        for entry in entries:
            run = entry.run_id
            if entry.position is not None and not entry.seq:
                position = entry.position
                if entry.type == "ack" and run is not None:
                    told.setdefault(run, 0)
            elif run is not None and entry.seq == told.get(run, -1) + 1:
                told[run] = entry.seq
            if run is not None and (end := ended.get(run)) and position >= end.last_ack and told.get(run) == end.events:
                del told[run]
            mark = Bookmark(position, dict(told))
            yield entry.model_copy(update={"bookmark": str(mark)}), mark

    def without(self, ended: Mapping[UUID, Ended]) -> Bookmark:
        """The same, without the runs of which nothing more can come."""
        over = {run for run, end in ended.items() if self.position >= end.last_ack and self.told.get(run) == end.events}
        return Bookmark(self.position, {run: seq for run, seq in self.told.items() if run not in over})


Place = int | str | Entry
"""A place in a log: a position, an entry that was read, or its bookmark."""


def derived_id(kind: str, scope: str, name: str) -> UUID:
    """The id that everybody computes alike from the same words (``chaz.derived_id`` in SQL).

    Version 8 of RFC 9562 over sha256: version 5 needs sha1, which PostgreSQL has in an extension only.
    """
    digest = bytearray(hashlib.sha256("\0".join((kind, scope, name)).encode()).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x80
    digest[8] = digest[8] & 0x3F | 0x80
    return UUID(bytes=bytes(digest))


def session_id(name: str, tenant: str = "") -> UUID:
    """The id of the session of this name."""
    return derived_id("session", tenant, name)


def safe_text(text: str, limit: int = MAX_CONTENT) -> str:
    """``text`` as PostgreSQL can hold it: NUL and lone surrogates replaced, cut to ``limit`` characters with a mark."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(text) > limit:
        mark = cut_mark(len(text), limit)
        text = (text[: max(0, limit - len(mark))] + mark)[:limit]
    return text


def cut_mark(whole: int, kept: int) -> str:
    """What stands where a text of so many characters is cut."""
    return f"… [cut: {whole} characters, {kept} kept]"


def fair_share(sizes: Iterable[int], room: int) -> int:
    """The most that each of several may have so that all fit into ``room``: what the small leave is the large ones'."""
    waiting = sorted(sizes, reverse=True)
    room = max(0, room)
    while waiting and waiting[-1] * len(waiting) <= room:
        room -= waiting.pop()
    # Nothing waits: all have what they need, and this is what any could have.
    return room // len(waiting) if waiting else sys.maxsize


MAX_TIMEOUT = 10 * 366 * 86_400.0
"""The most seconds that a run may be given; more would overflow an interval somewhere."""


def _reachable(instant: datetime) -> datetime:
    """PostgreSQL's and Python's instants reach further than each other's arithmetic; these are safe in both."""
    if not 1900 <= instant.year <= 9900:
        raise ValueError("an instant lies between the years 1900 and 9900")
    return instant


Instant = Annotated[AwareDatetime, AfterValidator(_reachable)]


class Budget(BaseModel):
    """What a tree of runs may use together; None: without limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(default=None, gt=0, lt=2**31)
    """Turns of models."""
    tokens: int | None = Field(default=None, gt=0, lt=2**63)
    """Prompts and completions."""
    cost: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """By the prices that agents name."""


class RunOptions(BaseModel):
    """What a producer asked of the run that answers its entry; travels in ``metadata.options``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    not_before: Instant | None = None
    expires: Instant | None = None
    """Not started by then, the run fails."""
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)
    """Seconds from the start of its time to its deadline."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    budget: Budget | None = None
    """Of the run and all that it spawns."""
    on_complete: Callback | None = None
    """What is told of the run's end, and to whom."""
