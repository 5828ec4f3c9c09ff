"""A conversation with a session, without its terminal: what a line that is typed does, and what is shown of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from chaz.cli.render import coloured, one_line, several_lines, what, whole_cost_text
from chaz.cli.sessions import activity
from chaz.cli.tree import drawing
from chaz.deciding import Request, Word
from chaz.entries import Entry, Place
from chaz.errors import ChazError, DatabaseUnavailable, InvalidEntry
from chaz.listings import SessionFilter, served_agents, tree_of
from chaz.outcomes import Spent
from chaz.producer import AsyncChaz, AsyncSession
from chaz.result import AsyncAgentResult

Asked = Request[Awaitable[UUID | None]]
WORDS: dict[str, Word] = {"y": "approve", "yes": "approve", "a": "approve_all", "all": "approve_all"}
REFUSALS = frozenset({"n", "no"})
FOLLOW_AGAIN = 0.5
"""Seconds between two tries to reach a database that is away."""
TREE_LINES = 8
"""So many runs of the tree at work are shown."""
HELP = """\
Whatever you type is a message to the session; @name says which agent is meant.
/agents             the agents of the session, and those that are served
/attach NAME        let an agent in (/attach NAME lead: it answers when nobody is named)
/detach NAME        let it go
/compact            have the conversation so far summarised
/cancel             end the run at work, and those that it spawned; Ctrl-C does the same
/approvals          what waits for a person's word
/approve [ID]       allow it (/approve all: and whatever else that run calls)
/deny [ID] [WHY]    do not
/answer TEXT        answer the question that was asked
/usage              what the agents of the session have used
/help, /quit        Ctrl-D and a second Ctrl-C leave, too; runs go on"""


class Conversation:
    """One person in one session. ``show`` is given lines as they come; coloured ones, if ``colour``."""

    def __init__(
        self,
        chaz: AsyncChaz,
        session: AsyncSession,
        *,
        sender: str,
        show: Callable[[str], None],
        colour: bool,
    ) -> None:
        self.leaving = False
        self.last: AsyncAgentResult | None = None
        """The handle of what was last sent."""
        self.asked: list[Asked] = []
        """What waits for a person's word here, the oldest first; as :meth:`look` saw it."""
        self._chaz = chaz
        self._session = session
        self._sender = sender
        self._show = show
        self._colour = colour
        self._sent: set[UUID] = set()
        self._after: Place = 0
        self._asking: Asked | None = None
        self._away = ""
        self._row: dict[str, Any] | None = None
        self._tree: list[dict[str, Any]] = []

    @property
    def active_run(self) -> UUID | None:
        """The run at work, as :meth:`look` saw it."""
        return None if self._row is None else self._row["run"]

    async def open(self, *, history: int) -> None:
        """Make the session if it is new; show so many of its last entries."""
        await self._session.configure()
        await self.look()
        placed = 0 if self._row is None else self._row["entries"]
        self._after = max(0, placed - history)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Show what has been placed by now."""
        async with aclosing(self._session.entries(after=self._after)) as entries:
            async for entry in entries:
                if entry.position is not None:
                    self._after = entry
                    self._show_entry(entry)

    async def follow(self) -> None:
        """Show entries as they come, for ever: while the database is away none, and each when it is back."""
        while True:
            with suppress(DatabaseUnavailable):
                async with aclosing(self._session.entries(follow=True, after=self._after)) as entries:
                    async for entry in entries:
                        self._after = entry
                        self._show_entry(entry)
            await asyncio.sleep(FOLLOW_AGAIN)

    async def look(self) -> None:
        """See what is at work and what is asked. Raises DatabaseUnavailable, which :meth:`status` tells then."""
        try:
            await self._look()
        except DatabaseUnavailable as error:
            self._away = one_line(str(error))
            raise
        self._away = ""

    async def _look(self) -> None:
        rows = await self._chaz.sessions(SessionFilter(id=self._session.id))
        self._row = rows[0] if rows else None
        self.asked = await self._session.approvals() if self._row is not None and self._row["asked"] else []
        run = self.active_run
        self._tree = [] if run is None else await tree_of(self._chaz.database, run)

    def status(self) -> list[str]:
        """What is up, in lines: the tree of the run at work, or that nothing is, or that nobody knows."""
        if self._away:
            return [self._away]
        if self._row is None:
            return ["…"]
        run = self.active_run
        if run is None or len(self._tree) < 2:
            return [activity(self._row, datetime.now(UTC))]
        lines = list(drawing(self._tree, run, datetime.now(UTC), colour=False))
        return lines if len(lines) <= TREE_LINES else [*lines[: TREE_LINES - 2], "…", lines[-1]]

    def question(self, *, typing: bool) -> str:
        """What the person is asked before the next line, which is taken as the answer to that.

        It stays the same while a line is being typed: nobody allows what came up meanwhile.
        """
        if not typing:
            self._asking = self.asked[0] if self.asked else None
        asked = self._asking
        if asked is None:
            return "> "
        if asked.kind == "question":
            choices = f" [{' | '.join(map(one_line, asked.choices))}]" if asked.choices else ""
            return f"your answer to {asked.agent}{choices} > "
        return f"allow {one_line(asked.tool)}? y, n [why], a for all of this run > "

    async def enter(self, line: str) -> None:
        """Do what a line asks for; what cannot be done is shown."""
        line = line.strip()
        if not line:
            return
        try:
            if line.startswith("/"):
                name, _, rest = line[1:].partition(" ")
                await self._command(name.lower(), rest.strip())
            elif self._asking is not None and await self._is_word(self._asking, line):
                await self.look()
            else:
                self.last = await self._session.say(line, sender=self._sender)
                self._sent.add(self.last.id)
        except ChazError as error:
            self._say(f"{error}", "31")

    async def cancel(self) -> bool:
        """Ask that the run at work be ended; whether there is one."""
        await self.look()
        run = self.active_run
        if run is None:
            return False
        await self._chaz.cancel(run, by=self._sender, reason="cancelled in a chat")
        self._say(f"run {run} is to be cancelled")
        return True

    async def _is_word(self, asked: Asked, line: str) -> bool:
        """Take the line as the word that is asked for, if it can be one."""
        first, _, rest = line.partition(" ")
        if asked.kind == "question":
            await self._decide(asked.id, "answer", line)
        elif not rest and first.lower() in WORDS:
            await self._decide(asked.id, WORDS[first.lower()])
        elif first.lower() in REFUSALS:
            await self._decide(asked.id, "deny", rest.strip())
        else:
            return False
        return True

    async def _decide(self, id: UUID, word: Word, text: str = "") -> None:
        if await self._chaz.decide(id, word, self._sender, text) is None:
            self._say(f"request {id} has been decided already")

    async def _command(self, name: str, rest: str) -> None:
        match name:
            case "help" | "?":
                self._say(HELP)
            case "quit" | "exit" | "q":
                self.leaving = True
            case "cancel":
                if not await self.cancel():
                    self._say("nothing is at work here; Ctrl-D or Ctrl-C twice leaves")
            case "agents":
                self._say(await self._agents())
            case "attach" | "detach":
                await self._change_roster(name, *rest.split())
            case "usage":
                for row in await self._chaz.usage("agent", session=self._session.id):
                    self._say(f"{one_line(row['agent'])}: {_used(Spent.model_validate(row))}")
                self._say(f"together: {_used(await self._session.usage())}")
            case "compact":
                # What came of it is in the log, and shown.
                self.last = await self._session.compact(sender=self._sender)
                self._sent.add(self.last.id)
            case "approvals":
                await self.look()
                for asked in self.asked:
                    self._say(f"{asked.id}  {asked.risk:6}  {asked.agent}: {_asks(asked)}")
                if not self.asked:
                    self._say("nobody is asked anything")
            case "approve":
                id, rest = self._request(rest)
                if rest not in {"", "all"}:
                    raise InvalidEntry(f"no request here begins with {rest.split()[0]!r}; /approvals lists them")
                await self._decide(id, "approve_all" if rest == "all" else "approve")
            case "deny":
                await self._decide(*self._with_word("deny", rest))
            case "answer":
                await self._decide(*self._with_word("answer", rest))
            case _:
                raise InvalidEntry(f"there is no command /{name}; /help lists them")
        await self.look()

    async def _agents(self) -> str:
        attached = await self._session.agents()
        names = {attachment.agent for attachment in attached}
        lines = [f"{one_line(each.agent)}{' (lead)' if each.lead else ''}" for each in attached]
        others = [name for name in await served_agents(self._chaz.database) if name not in names]
        return "\n".join([*(lines or ["nobody yet"]), *([f"served besides: {', '.join(others)}"] if others else [])])

    async def _change_roster(self, how: str, agent: str = "", lead: str = "", *more: str) -> None:
        if not agent or more or lead not in ({"", "lead"} if how == "attach" else {""}):
            raise InvalidEntry(f"/{how} NAME{' [lead]' if how == 'attach' else ''}")
        if how == "attach":
            done = await self._session.attach(agent, lead=bool(lead))
            self._say(f"{agent} is {'the lead' if lead else 'attached'}{'' if done else ' already'}")
        else:
            done = await self._session.detach(agent)
            self._say(f"{agent} is {'detached' if done else 'not attached'}")

    def _with_word(self, word: Word, rest: str) -> tuple[UUID, Word, str]:
        id, text = self._request(rest)
        return id, word, text

    def _request(self, rest: str) -> tuple[UUID, str]:
        """The request that is meant, and the words behind its id: the oldest, where no id begins so."""
        first, _, text = rest.partition(" ")
        meant = [asked for asked in self.asked if len(first) >= 4 and str(asked.id).startswith(first.lower())]
        if len(meant) == 1:
            return meant[0].id, text.strip()
        if meant:
            raise InvalidEntry(
                f"{first} begins the ids of several requests: {', '.join(str(each.id) for each in meant)}"
            )
        if not self.asked:
            raise InvalidEntry("nobody is asked anything here")
        return self.asked[0].id, rest

    def _say(self, text: str, colour: str = "2") -> None:
        self._show("\n".join(coloured(line, colour, on=self._colour) for line in text.splitlines()))

    def _show_entry(self, entry: Entry) -> None:
        if entry.id in self._sent:
            return
        self._show(spoken(entry, colour=self._colour))


def _used(spent: Spent) -> str:
    return f"{spent.calls} calls, {spent.prompt + spent.completion} tokens, cost {whole_cost_text(spent)}"


def _asks(asked: Asked) -> str:
    return one_line(asked.shown if asked.kind == "question" else f"{asked.tool} {asked.shown}")


_NAME_COLOURS = ("1;32", "1;36", "1;35", "1;34", "1;33")


def spoken(entry: Entry, *, colour: bool) -> str:
    """An entry as a conversation shows it: who said what, whole; the rest as one line at its side."""
    match entry.type:
        case "message" | "directive" | "summary":
            who = one_line(entry.sender) + (f" → {one_line(entry.recipient)}" if entry.recipient else "")
            if entry.type == "summary":
                who += ", in summary of what came before"
            hue = _NAME_COLOURS[sum(entry.sender.encode()) % len(_NAME_COLOURS)] if entry.author == "agent" else "1"
            text = several_lines(entry.content)
            return f"{coloured(who, hue, on=colour)}: {text}"
        case "error":
            return coloured(f"  ✗ {one_line(entry.content)}", "31", on=colour)
        case "approval_request":
            return coloured(f"  ? {what(entry)}", "1;33", on=colour)
        case _:
            return coloured(f"  · {what(entry)}", "2", on=colour)


async def look_again(conversation: Conversation, every: float) -> None:
    """Keep what a conversation knows of what is at work fresh, for ever; a service that is away comes back."""
    while True:
        with suppress(ChazError):
            await conversation.look()
        await asyncio.sleep(every)
