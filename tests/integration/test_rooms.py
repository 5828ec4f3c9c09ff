"""The agents of a session: attached and detached by people, while the session is at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import UUID

import psycopg
import pytest

from chaz import AsyncChaz, Chaz, InvalidEntry, UnknownSession, sweeps
from chaz.aside import Aside
from chaz.cli import main
from chaz.entries import session_id
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


def roster(chaz: Chaz, session: str = "s") -> list[str]:
    """The session's agents in order, the lead marked."""
    return [f"{attached.agent}{'*' if attached.lead else ''}" for attached in chaz.session(session).agents()]


def test_the_first_attached_leads_until_another_is_made_the_lead(chaz: Chaz) -> None:
    session = chaz.session("s")
    assert session.attach("alpha")
    assert session.attach("beta")
    assert roster(chaz) == ["alpha*", "beta"]
    assert session.attach("gamma", lead=True)
    assert roster(chaz) == ["alpha", "beta", "gamma*"]
    assert session.attach("beta", lead=True)
    assert roster(chaz) == ["alpha", "beta*", "gamma"]


def test_to_attach_twice_changes_nothing(chaz: Chaz) -> None:
    session = chaz.session("s")
    session.attach("alpha")
    session.attach("beta", lead=True)
    before = session.agents()
    assert not session.attach("beta")
    assert not session.attach("beta", lead=True)
    assert not session.attach("alpha")
    assert session.agents() == before


def test_without_its_lead_the_first_attached_leads(chaz: Chaz) -> None:
    session = chaz.session("s")
    for agent in ("alpha", "beta", "gamma"):
        session.attach(agent)
    # Both led once: that is over.
    session.attach("beta", lead=True)
    session.attach("gamma", lead=True)
    assert session.detach("gamma")
    assert roster(chaz) == ["alpha*", "beta"]
    assert session.detach("alpha")
    assert roster(chaz) == ["beta*"]
    # Who comes back comes last.
    session.attach("alpha")
    assert roster(chaz) == ["beta*", "alpha"]
    session.attach("gamma")
    assert roster(chaz) == ["beta*", "alpha", "gamma"]


def test_to_detach_who_is_not_attached_is_no_error(chaz: Chaz) -> None:
    session = chaz.session("s")
    assert not session.detach("alpha")
    session.attach("alpha")
    assert not session.detach("beta")
    assert session.detach("alpha")
    assert not session.detach("alpha")
    assert session.agents() == []


def test_what_is_wrong_is_said(chaz: Chaz, database: ScratchDatabase) -> None:
    session, unknown = chaz.session("s"), chaz.session(id=UUID(int=7))
    changes: list[Callable[[str], bool]] = [session.attach, session.detach]
    for change in changes:
        with pytest.raises(InvalidEntry, match="an agent's name has 1 to 200 characters, not 0"):
            change("")
        with pytest.raises(InvalidEntry, match="cannot hold NUL"):
            change("a\0b")
    changes = [unknown.attach, unknown.detach, lambda _: bool(unknown.agents()), lambda _: bool(session.agents())]
    for change in changes:
        with pytest.raises(UnknownSession):
            change("alpha")
    with pytest.raises(psycopg.Error, match="lead is true or false"):
        database.query("select chaz.attach('s', 'alpha', null)")
    with pytest.raises(psycopg.Error, match="a session's name has 1 to 200 characters, not 0"):
        database.query("select chaz.detach('', 'alpha')")
    assert database.query("select from chaz.roster_changes") == []


def test_a_session_is_made_by_its_name_and_found_by_its_id(chaz: Chaz) -> None:
    chaz.session("s").attach("alpha")
    chaz.session(id=session_id("s")).attach("beta")
    assert roster(chaz) == ["alpha*", "beta"]
    fresh = chaz.session()
    fresh.attach("gamma")
    assert [attached.agent for attached in chaz.session(id=fresh.id).agents()] == ["gamma"]


def test_a_session_with_nothing_placed_has_no_agents(chaz: Chaz) -> None:
    chaz.session("s").say("hello")
    assert chaz.session("s").agents() == []


def test_tenants_have_their_own_rooms(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").attach("alpha")
    assert database.value("select chaz.attach('s', 'beta', tenant => 'acme')")
    assert roster(chaz) == ["alpha*"]
    for change in ("attach", "detach"):
        with pytest.raises(psycopg.Error, match="no session"):
            database.query(f"select chaz.{change}(chaz.session_id('s')::text, 'beta', tenant => 'acme')")  # pyright: ignore[reportArgumentType]


async def test_the_same_with_await(database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz:
        session = chaz.session("s")
        assert await session.attach("alpha")
        assert await session.attach("beta", lead=True)
        assert [(each.agent, each.lead) for each in await session.agents()] == [("alpha", False), ("beta", True)]
        assert await session.detach("beta")
        assert [(each.agent, each.lead) for each in await session.agents()] == [("alpha", True)]


def test_the_command_line(database: ScratchDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--database", database.url])
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.out.strip()

    assert command("attach", "den", "alpha") == "alpha is attached; the session's agents: alpha (lead)"
    assert command("attach", "den", "beta", "--lead") == "beta is the lead; the session's agents: alpha, beta (lead)"
    assert command("attach", "den", "alpha").startswith("alpha is attached already; ")
    assert json.loads(command("detach", "den", "beta", "--json")) == {
        "session": str(session_id("den")),
        "agent": "beta",
        "done": True,
        "agents": [{"agent": "alpha", "lead": True}],
    }
    assert command("detach", "den", "beta").startswith("beta is not attached; ")
    assert command("detach", "den", "alpha") == "alpha is detached; the session's agents: none"
    command("session", "den", "--burst", "2")
    assert database.value("select burst from chaz.sessions") == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("log", "x\udcff"), 65),
        (("session", "x\udcff", "--burst", "1"), 65),
        (("attach", "x\udcff", "solo"), 65),
        (("chat", "x\udcff"), 65),
        (("runs", "--agent", "x\udcff"), 0),
        (("sessions", "--name", "x\udcff"), 0),
        (("sessions", "--agent", "x\0"), 0),
    ],
)
def test_a_name_that_is_no_text(
    arguments: tuple[str, ...], code: int, database: ScratchDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--database", database.url])
    said = capsys.readouterr()
    assert ended.value.code == code
    assert said.err == (r"chaz: a session's name cannot hold NUL or lone surrogates, as 'x\udcff' does" + "\n") * (
        code > 0
    )


# While the session is at work


async def test_a_message_finds_the_roster_as_it_is_when_it_is_placed(stations: Stations, chaz: Chaz) -> None:
    chaz.session("s").attach("child")
    chaz.session("s").attach("solo")
    mentioned, to_nobody = await stations.say("s", "@solo?"), await stations.say("s", "anybody?")
    chaz.session("s").attach("solo", lead=True)
    chaz.session("s").detach("child")
    chaz.session("s").attach("parent")
    await stations.place()
    assert [(await stations.run(run))["agent"] for run in (mentioned, to_nobody)] == ["solo", "solo"]


async def test_an_empty_room_falls_back_on_the_default_agent(stations: Stations, chaz: Chaz) -> None:
    chaz.session("s").attach("child")
    chaz.session("s").detach("child")
    run = await stations.say("s", "@child?")
    await stations.place(default_agent="solo")
    assert (await stations.run(run))["agent"] == "solo"
    assert roster(chaz) == ["solo*"]


async def test_the_runs_of_a_detached_agent_go_on(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claimed("s")
    waiting = await stations.send("s", "and then")
    await stations.place()
    assert chaz.session("s").detach("solo")
    await stations.end(claim)
    await stations.end(await stations.claim(waiting))
    assert roster(chaz) == []
    # A directive is an instruction to work here.
    await stations.claimed("s")
    assert roster(chaz) == ["solo*"]


async def test_an_agent_whose_worker_comes_later(stations: Stations, chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").attach("newcomer")
    first = await stations.say("s")
    directed = await stations.send("s", recipient="ghost")
    await stations.place()
    for run in (first, directed):
        database.query("update chaz.runs set queued_at = now() - interval '1 minute' where id = %(id)s", id=run)
        await sweeps.close_late(stations.database, grace=10, lease=15, aside=Aside())
        assert await stations.state(run) == "failed"
    # Whom somebody attached by name stays; whom a directive named only does not.
    assert roster(chaz) == ["newcomer*"]
    await stations.register("newcomer")
    run = await stations.say("s")
    await stations.place()
    await stations.claim(run, "newcomer")


@pytest.mark.parametrize("change", ["select chaz.attach('s', 'child', true)", "select chaz.detach('s', 'child')"])
async def test_a_change_that_is_not_committed_holds_up_no_placing(
    stations: Stations, database: ScratchDatabase, chaz: Chaz, change: str
) -> None:
    await stations.end(await stations.claimed("s"))
    if "detach" in change:
        chaz.session("s").attach("child")
    with database.connect() as producer:
        producer.execute(change.encode())
        # Even where a directive attaches the very same agent.
        run = await stations.send("s", recipient="child")
        assert (await stations.place()).entries == 1
        assert await stations.state(run) == "queued"
        await stations.end(await stations.claim(run, "child"))
        producer.commit()
    assert roster(chaz) == (["solo*"] if "detach" in change else ["solo", "child*"])


async def test_a_new_session_waits_for_whoever_makes_it_and_no_other(
    stations: Stations, database: ScratchDatabase, chaz: Chaz
) -> None:
    mine, other = await stations.say("s"), await stations.say("t", recipient="solo")
    with database.connect() as producer:
        producer.execute("select chaz.attach('s', 'child')")
        assert (await stations.place()).entries == 1
        assert await stations.state(other) == "queued"
        producer.commit()
    assert (await stations.place()).entries == 1
    assert (await stations.run(mine))["agent"] == "child"


async def test_who_attaches_at_the_same_time_waits_for_nobody(
    stations: Stations, database: ScratchDatabase, chaz: Chaz
) -> None:
    chaz.session("s").configure(on_message="each")
    with database.connect() as one, database.connect() as two:
        two.execute("set lock_timeout = '100ms'")
        one.execute("select chaz.attach('s', 'alpha')")
        two.execute("select chaz.attach('s', 'alpha', true)")
        two.execute("select chaz.attach('s', 'beta')")
        one.commit()
        two.commit()
    assert roster(chaz) == ["alpha*", "beta"]
