"""Requests to people: asked once, decided once, by whoever may, and never left open by a run that is over."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from chaz import AsyncChaz, Chaz, InvalidEntry, approvals, deciding, journal
from chaz.asking import Approving, Ask
from chaz.cli import main
from chaz.database import translated
from chaz.deliveries import AuditEvent
from chaz.entries import Budget
from chaz.errors import NotPermitted, UnknownRequest
from chaz.planning import Ceilings
from chaz.runjournal import RunJournal
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def stored(stations: Stations, run: UUID) -> list[journal.StoredCall]:
    """The run's calls, as a worker would find them."""
    return (await stations.transact(lambda tx: journal.load(tx, run)))[1]


async def decisions(stations: Stations, session: str) -> list[tuple[str, str, str]]:
    """Sender, decision and text of the log's decisions."""
    return [
        (entry.sender, entry.metadata["decision"], entry.content)
        for entry in await stations.log(session)
        if entry.type == "approval_decision"
    ]


async def notes(stations: Stations, session: str) -> list[str]:
    """The log's notes."""
    return [entry.content for entry in await stations.log(session) if entry.type == "note"]


async def expire(stations: Stations, request: UUID) -> None:
    """Let a request's time be over."""
    stations.scratch.query(
        "update chaz.approvals set expires_at = now() - interval '1 s' where id = %(id)s", id=request
    )


# Asking


async def test_a_request_is_an_entry_and_the_run_waits(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s", risk="high")

    assert await stations.state(claim.run_id) == "parked"
    (entry,) = [entry for entry in await stations.log("s") if entry.type == "approval_request"]
    assert (entry.id, entry.run_id, entry.sender, entry.author) == (request, claim.run_id, "solo", "agent")
    assert entry.content == 'may solo call delete_file? {"text": "a b c"}'
    facts = {name: entry.metadata[name] for name in ("tool", "risk", "arguments", "kind", "step", "ordinal")}
    assert facts == {
        "tool": "delete_file",
        "risk": "high",
        "arguments": '{"text": "a b c"}',
        "kind": "approval",
        "step": 0,
        "ordinal": 0,
    }
    assert entry.metadata["hash"] == stations.scratch.value("select digest from chaz.approvals")
    (call,) = await stored(stations, claim.run_id)
    assert (call.started, call.waiting, call.answer) == (False, True, None)


async def test_an_approved_call_is_the_runs_to_start(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s")

    assert await stations.decide(request, "approve", reason="fine")

    assert await stations.state(claim.run_id) == "queued"
    claim = await stations.claim(claim.run_id)
    (call,) = await stored(stations, claim.run_id)
    assert (call.started, call.waiting) == (False, False)
    assert call.answer is not None
    assert call.answer.kind == "ok"
    await stations.start_call(claim, tool="delete_file")
    (call,) = await stored(stations, claim.run_id)
    assert (call.started, call.waiting, call.answer) == (True, False, None)
    assert [entry.type for entry in await stations.log("s")] == [
        *("directive", "ack", "approval_request", "approval_decision", "ack")
    ]
    assert stations.scratch.value("select decided_as from chaz.approvals") == stations.scratch.value("select user")


async def test_a_started_call_of_a_lost_worker_is_in_doubt_though_it_was_approved(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s")
    await stations.decide(request, "approve")
    claim = await stations.claim(claim.run_id)
    await stations.start_call(claim, tool="delete_file")
    await stations.give_back(claim)
    (call,) = await stored(stations, claim.run_id)
    assert (call.started, call.waiting, call.answer, call.outcome) == (True, False, None, None)


@pytest.mark.parametrize(
    ("word", "reason", "told"),
    [("deny", "too risky", "denied by ada: too risky"), ("deny", "", "denied by ada: no reason given")],
)
async def test_a_denied_call_is_told_who_and_why(stations: Stations, word: str, reason: str, told: str) -> None:
    claim, (request,) = await stations.asking("s")

    await stations.decide(request, word, reason=reason)

    assert await stations.state(claim.run_id) == "queued"
    (call,) = await stored(stations, claim.run_id)
    assert call.answer is not None
    assert (call.answer.kind, call.answer.error, call.answer.content) == ("error", "denied", told)
    assert await decisions(stations, "s") == [("ada", "deny", reason)]


async def test_calls_of_a_step_are_decided_one_by_one_and_the_run_goes_on_once(stations: Stations) -> None:
    claim, (first, second, third) = await stations.asking("s", calls=3)

    await stations.decide(second, "deny", reason="no")
    await stations.decide(first, "approve")
    assert await stations.state(claim.run_id) == "parked"
    await stations.decide(third, "approve")

    assert await stations.state(claim.run_id) == "queued"
    kinds = [call.answer.kind for call in await stored(stations, claim.run_id) if call.answer is not None]
    assert kinds == ["ok", "error", "ok"]


async def test_a_decision_that_comes_while_the_run_works_on_is_not_missed(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("delete_file"))
    assert await stations.ask(claim) is None
    await stations.decide(approvals.request_id(claim.run_id, 0, 0), "approve")

    assert not await stations.park(claim)


# approve_all and auto-approval


async def test_approve_all_covers_the_run_and_what_it_still_asks_and_no_other_run(stations: Stations) -> None:
    claim, (first, _) = await stations.asking("s", calls=2)
    await stations.decide(first, "approve_all")

    assert await stations.state(claim.run_id) == "queued"
    assert [decision for _, decision, _ in await decisions(stations, "s")] == ["approve_all", "approve"]
    claim = await stations.claim(claim.run_id)
    await stations.step(claim, a_call("delete_file"), step=1)
    outcome = await stations.ask(claim, step=1)
    assert outcome is not None
    assert outcome.kind == "ok"

    child = (await stations.spawning("parent"))[1][0]
    stations.scratch.query("update chaz.runs set approve_all = true where id <> %(child)s", child=child)
    claim = await stations.claim(child, "child")
    await stations.step(claim, a_call("delete_file"))
    assert await stations.ask(claim) is None


@pytest.mark.parametrize(
    ("session", "deployment", "always", "granted"),
    [
        (None, ["delete_*"], False, True),
        (None, ["other"], False, False),
        (["delete_file"], [], False, True),
        ([], ["delete_*"], False, False),
        (["*"], ["*"], True, False),
    ],
)
async def test_a_list_of_tools_stands_for_a_persons_word_unless_that_is_always_needed(
    stations: Stations,
    async_chaz: AsyncChaz,
    session: list[str] | None,
    deployment: list[str],
    always: bool,
    granted: bool,
) -> None:
    if session is not None:
        await async_chaz.session("s").configure(auto_approve=session)
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("delete_file"))

    outcome = await stations.ask(claim, auto_approve=deployment, unless_auto_approved=not always)

    assert (outcome is not None) == granted


# Nobody to ask


@pytest.mark.parametrize(("session", "deployment"), [(None, []), ([], ["ada"])])
async def test_what_nobody_may_approve_is_denied_at_once_and_the_log_says_why(
    stations: Stations, async_chaz: AsyncChaz, session: list[str] | None, deployment: list[str]
) -> None:
    if session is not None:
        await async_chaz.session("s").configure(approvers=session)
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("delete_file"))

    outcome = await stations.ask(claim, approvers=deployment)

    assert outcome is not None
    assert (outcome.kind, outcome.error) == ("error", "denied")
    assert await notes(stations, "s") == [
        "'solo' may not use 'delete_file': that needs a person's word, and no approver is named for this session or "
        "the deployment (CHAZ_APPROVERS)"
    ]
    assert not stations.scratch.query("select from chaz.approvals")


# Who may decide


async def test_a_stranger_decides_nothing_and_the_log_says_so(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s", approvers=["ada", "ops-*"])

    await stations.decide(request, "approve", by="eve")

    assert await stations.state(claim.run_id) == "parked"
    assert await notes(stations, "s") == [f"'eve' may not decide request {request}; who may: ada, ops-*"]
    await stations.decide(request, "approve", by="ops-berlin")
    assert await stations.state(claim.run_id) == "queued"


async def test_a_sessions_approvers_come_before_the_deployments(stations: Stations, async_chaz: AsyncChaz) -> None:
    claim, (request,) = await stations.asking("s")
    await async_chaz.session("s").configure(approvers=["bob"])

    await stations.decide(request, "approve", by="ada")
    assert await stations.state(claim.run_id) == "parked"
    await stations.decide(request, "approve", by="bob")
    assert await stations.state(claim.run_id) == "queued"


async def test_an_agent_never_decides(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s", approvers=["*"])
    insert = """
        insert into chaz.entries (session_id, type, sender, author, content, metadata)
        select session_id, 'approval_decision', 'solo', %(author)s, '',
            jsonb_build_object('request', id, 'decision', 'approve')
        from chaz.approvals where id = %(id)s
    """
    with pytest.raises(psycopg.Error, match="an agent decides nothing"):
        stations.scratch.query(insert, author="agent", id=request)
    # Nor can a word of the system's approve.
    stations.scratch.query(insert, author="system", id=request)
    await stations.place()
    assert await stations.state(claim.run_id) == "parked"


async def test_only_the_approvers_role_may_decide(stations: Stations, database: ScratchDatabase) -> None:
    _, (request,) = await stations.asking("s")
    role = f"test_{uuid4().hex}"
    database.query(
        f"""
        create role {role};
        grant usage on schema chaz to {role};
        grant select, insert on chaz.entries, chaz.approvals to {role};
        """  # pyright: ignore[reportArgumentType]
    )
    try:
        with database.connect() as connection:
            connection.execute(f"set role {role}")  # pyright: ignore[reportArgumentType, reportCallIssue]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("select chaz.decide(%s, 'approve', 'ada')", (request,))
            connection.rollback()
            connection.execute(f"set role {role}")  # pyright: ignore[reportArgumentType, reportCallIssue]
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not decide"):
                connection.execute(
                    "insert into chaz.entries (session_id, type, sender, content)"
                    " values (gen_random_uuid(), 'approval_decision', 'ada', '')"
                )
            connection.rollback()
        database.query(f"grant chaz_approver to {role}")  # pyright: ignore[reportArgumentType]
        with database.connect() as connection:
            connection.execute(f"set role {role}")  # pyright: ignore[reportArgumentType, reportCallIssue]
            connection.execute("select chaz.decide(%s, 'approve', 'ada')", (request,))
            connection.commit()
    finally:
        database.query(f"drop owned by {role}; drop role {role}")  # pyright: ignore[reportArgumentType]
    await stations.place()
    assert stations.scratch.value("select decision from chaz.approvals") == "approve"


async def test_a_role_that_may_not_decide_is_told_so() -> None:
    error = translated(psycopg.errors.InsufficientPrivilege("the role eve may not decide"), "here")
    assert isinstance(error, NotPermitted)
    assert str(error).startswith("the role eve may not decide; ")


# The first decision wins


async def test_a_second_decision_changes_nothing_and_says_so(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s")
    for word in ("deny", "approve"):
        await stations.transact(lambda tx, word=word: deciding.decide(tx, request, word, "ada", word))
    await stations.place()

    assert await stations.state(claim.run_id) == "queued"
    assert stations.scratch.value("select decision from chaz.approvals") == "deny"
    assert await notes(stations, "s") == [
        f"request {request} had been denied by ada before; this decision changes nothing"
    ]
    assert not await stations.decide(request, "approve")


async def test_a_request_times_out_once_and_absorbs_later_decisions(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s")
    assert not await stations.transact(lambda tx: approvals.time_out(tx, request))
    await expire(stations, request)

    assert await stations.transact(lambda tx: approvals.time_out(tx, request))
    assert not await stations.transact(lambda tx: approvals.time_out(tx, request))

    assert await stations.state(claim.run_id) == "queued"
    (call,) = await stored(stations, claim.run_id)
    assert call.answer is not None
    assert call.answer.content == "timed_out: not approved in time; it was not made"
    assert await decisions(stations, "s") == [("system", "timed_out", "")]
    assert not await stations.decide(request, "approve")


async def test_a_decision_that_was_sent_in_time_counts_though_it_is_placed_late(stations: Stations) -> None:
    _, (request,) = await stations.asking("s")
    await stations.transact(lambda tx: deciding.decide(tx, request, "approve", "ada"))
    stations.scratch.query("update chaz.approvals set expires_at = clock_timestamp()")

    assert not await stations.transact(lambda tx: approvals.time_out(tx, request))
    await stations.place()
    assert stations.scratch.value("select decision from chaz.approvals") == "approve"


async def test_a_decision_that_was_sent_too_late_does_not_count_though_no_listener_has_closed_it(
    stations: Stations,
) -> None:
    claim, (request,) = await stations.asking("s")
    await expire(stations, request)

    await stations.decide(request, "approve")

    assert stations.scratch.value("select decision from chaz.approvals") == "timed_out"
    assert await stations.state(claim.run_id) == "queued"
    assert [sender for sender, decision, _ in await decisions(stations, "s") if decision == "timed_out"] == ["chaz"]
    assert await notes(stations, "s") == [f"request {request} had been timed out before; this decision changes nothing"]


# Where it is asked


async def test_a_child_asks_where_its_tree_was_started_unless_its_own_session_names_approvers(
    stations: Stations, async_chaz: AsyncChaz
) -> None:
    _, (first, second) = await stations.spawning("top", children=2)
    for child in (first, second):
        claim = await stations.claim(child, "child")
        await stations.step(claim, a_call("delete_file"))
        if child == second:
            await async_chaz.session(id=claim.session_id).configure(approvers=["ada"])
        assert await stations.ask(claim) is None
        await stations.park(claim)

    (request,) = await async_chaz.session("top").approvals()
    assert (request.run_id, request.agent) == (first, "child")
    (entry,) = [entry for entry in await stations.log("top") if entry.type == "approval_request"]
    assert (entry.sender, entry.run_id) == ("child", first)
    assert [request.run_id for request in await async_chaz.approvals()] == [first, second]
    await request.approve(by="ada")
    await stations.place()
    assert await stations.state(first) == "queued"


# The end of a run


@pytest.mark.parametrize("child", [False, True])
async def test_a_run_that_ends_closes_what_it_had_asked(stations: Stations, child: bool) -> None:
    if child:
        run = (await stations.spawning("s"))[1][0]
        claim = await stations.claim(run, "child")
        await stations.step(claim, a_call("delete_file"))
        assert await stations.ask(claim) is None
        await stations.park(claim)
    else:
        claim, _ = await stations.asking("s")
    request = approvals.request_id(claim.run_id, 0, 0)

    await stations.close(claim.run_id, "parked")
    await stations.place()

    assert await decisions(stations, "s") == [("system", "cancelled", "")]
    assert not await stations.decide(request, "approve")
    assert await stations.state(claim.run_id) == "failed"


# Questions


async def test_a_question_is_answered_with_a_text(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s", kind="question", shown="Which one?")
    (call,) = await stored(stations, claim.run_id)
    assert (call.started, call.waiting) == (True, True)

    with pytest.raises(InvalidEntry, match="is a question; answer it"):
        await stations.decide(request, "approve")
    await stations.decide(request, "answer", reason="the left one")

    (call,) = await stored(stations, claim.run_id)
    assert call.answer is not None
    assert (call.answer.kind, call.answer.content) == ("ok", "the left one")


async def test_an_answer_is_one_of_the_choices(stations: Stations) -> None:
    _, (request,) = await stations.asking("s", kind="question", shown="Which one?", choices=["left", "right"])

    with pytest.raises(InvalidEntry, match="is one of left, right"):
        await stations.decide(request, "answer", reason="up")
    assert await stations.decide(request, "answer", reason="right")
    assert stations.scratch.value("select reason from chaz.approvals") == "right"


async def test_a_question_may_hold_whatever_a_model_writes(stations: Stations) -> None:
    await stations.asking("s", kind="question", shown="Wh\0ich\ud800?", choices=["l\0eft", "right\ud800"])

    (entry,) = [entry for entry in await stations.log("s") if entry.type == "approval_request"]
    assert entry.content == "Wh\ufffdich\ufffd?"
    assert entry.metadata["choices"] == ["l\ufffdeft", "right\ufffd"]


@pytest.mark.parametrize("kind", ["approval", "question"])
async def test_what_cannot_be_stored_is_denied_and_a_question_has_its_result(stations: Stations, kind: Any) -> None:
    async def no_wait() -> None:
        pass

    claim = await stations.claimed("s")
    await stations.step(claim, a_call("ask_human"))
    stations.scratch.query("alter table chaz.approvals add constraint broken check (false)")
    told: list[AuditEvent] = []
    keeper = RunJournal(
        stations.database, claim, "v1", "scripted", Budget(), Approving(["ada"]), told.extend, no_wait, Ceilings()
    )

    ask = Ask(kind=kind, tool="ask_human", shown="Which one?", digest="")
    outcome = await keeper.ask(0, 0, a_call("ask_human"), ask)

    assert outcome is not None
    assert outcome.content == "denied: the request for a person's word could not be stored (InvalidEntry)"
    calls = await stored(stations, claim.run_id)
    assert [call.outcome for call in calls] == ([outcome] if kind == "question" else [])
    assert [event.kind for event in told] == (["tool_call", "tool_result"] if kind == "question" else [])


# Programs


async def test_a_request_is_decided_from_python(stations: Stations, chaz: Chaz) -> None:
    claim, _ = await stations.asking("s", calls=2)
    first, second = chaz.session("s").approvals()
    assert (first.run_id, first.tool, first.risk, first.decision) == (claim.run_id, "delete_file", "low", None)

    assert first.approve(by="ada")
    assert second.deny(by="ada", reason="no")
    await stations.place()

    assert not first.approve(by="ada")
    assert chaz.approval(second.id).decision == "deny"
    assert chaz.session("s").approvals() == []
    with pytest.raises(UnknownRequest, match="no request nonsense"):
        chaz.decide("nonsense", "approve")
    with pytest.raises(UnknownRequest):
        chaz.decide(uuid4(), "approve")


@pytest.mark.parametrize("id", ["", "{beginning}"])
async def test_the_command_line_takes_no_beginning_that_says_little(
    stations: Stations, capsys: pytest.CaptureFixture[str], id: str
) -> None:
    # As of a shell's variable that is not set.
    _, (request,) = await stations.asking("s")
    arguments = ["approve", id.format(beginning=str(request)[:3]), "--database", stations.scratch.url]

    with pytest.raises(SystemExit) as exit:
        await asyncio.to_thread(main, arguments)

    assert exit.value.code == 66
    assert "no request" in capsys.readouterr().err
    assert not await stations.fetch("select from chaz.entries where type = 'approval_decision'")


@pytest.fixture
async def async_chaz(database: ScratchDatabase):
    async with AsyncChaz(database.url) as made:
        yield made


async def test_a_request_is_found_by_the_beginning_of_its_id(stations: Stations) -> None:
    _, requests = await stations.asking("s", calls=3)
    text = str(requests[0])
    for beginning in (text, text[:13], text.upper()[:12]):
        assert await deciding.beginning_with(stations.database, beginning) == requests[:1]
    for nonsense in ("", "7", "xyz", f"{text}0", "%"):
        assert await deciding.beginning_with(stations.database, nonsense) == []


# What anybody with the role may insert


@pytest.mark.parametrize(
    "metadata",
    [
        "'{}'",
        """'{"request": 7, "decision": "approve"}'""",
        """'{"request": ["a"], "decision": "approve"}'""",
        "jsonb_build_object('request', repeat('x', 2000000), 'decision', 'approve')",
        "jsonb_build_object('request', id)",
        "jsonb_build_object('request', id, 'decision', 7)",
        "jsonb_build_object('request', id, 'decision', '[]'::jsonb)",
        "jsonb_build_object('request', id, 'decision', '{}'::jsonb)",
        "jsonb_build_object('request', id, 'decision', repeat('x', 2000000))",
        "jsonb_build_object('request', id, 'decision', 'timed_out')",
    ],
)
async def test_a_decision_that_makes_no_sense_is_noted_and_holds_up_nobody(stations: Stations, metadata: str) -> None:
    claim, (request,) = await stations.asking("s")
    stations.scratch.query(
        f"""
        insert into chaz.entries (session_id, type, sender, content, metadata)
        select session_id, 'approval_decision', 'ada', '', {metadata} from chaz.approvals
        """  # pyright: ignore[reportArgumentType]
    )

    await stations.place()

    assert len(await notes(stations, "s")) == 1
    assert await stations.state(claim.run_id) == "parked"
    await stations.decide(request, "approve")
    assert await stations.state(claim.run_id) == "queued"


@pytest.mark.parametrize("sent", ["infinity", "-infinity", "20000-01-01"])
async def test_a_decision_says_nothing_of_its_own_time(stations: Stations, sent: str) -> None:
    _, requests = await stations.asking("s", calls=2)
    await expire(stations, requests[1])
    stations.scratch.query(
        """
        insert into chaz.entries (session_id, type, sender, content, metadata, created_at)
        select session_id, 'approval_decision', 'ada', '', jsonb_build_object('request', id, 'decision', 'approve'),
            %(sent)s
        from chaz.approvals
        """,
        sent=sent,
    )

    await stations.place()

    decided = await stations.fetch("select decision from chaz.approvals order by ordinal")
    assert [row["decision"] for row in decided] == ["approve", "timed_out"]


async def test_many_approvers_do_not_make_a_note_too_long(stations: Stations) -> None:
    _, (request,) = await stations.asking("s", approvers=[f"{number:0200}" for number in range(6000)])

    await stations.decide(request, "approve", by="eve")

    (note,) = await notes(stations, "s")
    assert note.startswith(f"'eve' may not decide request {request}")


async def test_a_decision_of_another_tenant_or_in_another_session_decides_nothing(stations: Stations) -> None:
    claim, (request,) = await stations.asking("s")
    insert = """
        insert into chaz.entries (tenant, session_id, type, sender, content, metadata)
        select %(tenant)s, coalesce(%(session)s, session_id), 'approval_decision', 'ada', '',
            jsonb_build_object('request', id, 'decision', 'approve')
        from chaz.approvals where id = %(request)s
    """
    other = uuid4()
    stations.scratch.query(insert, tenant="", session=other, request=request)
    stations.scratch.query(insert, tenant="theirs", session=None, request=request)

    await stations.place()

    assert await stations.state(claim.run_id) == "parked"
    assert stations.scratch.value("select decision from chaz.approvals") is None
    errors = [entry.content for entry in await stations.log("s") if entry.type == "error"]
    assert errors == ["the entry's tenant is 'theirs', not the session's"]
