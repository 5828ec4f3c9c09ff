"""`chaz doctor`: each thing that a deployment stands on, seen well and seen ill."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta
from functools import partial
from typing import Any, LiteralString
from uuid import uuid4

import pytest

from chaz import Chaz, cancelling, limits, pauses
from chaz.aside import Aside
from chaz.broker import dead_letter_queue
from chaz.doctor import Finding, examine
from chaz.doctor import broker as doctors_broker
from chaz.subjects import Subject
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.postgres import ScratchDatabase, Server, both_servers
from tests.fixtures.processes import Processes
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

A_MOMENT = timedelta(seconds=0)
LONG_AGO = timedelta(hours=1)
EVERYTHING = {
    *("postgresql", "schema", "doorbell", "listeners", "workers", "agents", "isolation", "paused", "limits"),
    *("inbox", "queued", "leases", "parked", "cancels", "audit", "callbacks", "broker", "audit queue", "dead letters"),
}
NOBODY_LISTENS = "redis://127.0.0.1:1/0"


class Doctor:
    """Looks at the test's database and broker."""

    def __init__(self, stations: Stations, broker: Broker) -> None:
        self._stations, self._broker = stations, broker

    async def findings(self, **settings: Any) -> dict[str, Finding]:
        chosen = self._broker.settings(database_url=self._stations.scratch.url).model_copy(update=settings)
        found = await examine(chosen)
        assert len({finding.name for finding in found}) == len(found)
        return {finding.name: finding for finding in found}

    async def says(self, name: str) -> tuple[str, str]:
        """Verdict and text of one finding."""
        finding = (await self.findings())[name]
        return finding.verdict, finding.text

    async def change(self, statement: LiteralString, **parameters: Any) -> None:
        self._stations.scratch.query(statement, **parameters)

    async def listener(self, mode: str = "listening", seen: timedelta = A_MOMENT) -> None:
        await self.change(
            """
            insert into chaz.listeners (id, name, pid, mode, seen_at)
            values (gen_random_uuid(), 'test', 1, %(mode)s, now() - %(seen)s)
            """,
            mode=mode,
            seen=seen,
        )


@pytest.fixture
def doctor(stations: Stations, broker: Broker) -> Doctor:
    return Doctor(stations, broker)


@both_servers
async def test_all_is_well(doctor: Doctor, stations: Stations) -> None:
    await doctor.listener()
    stations.beat(timedelta(hours=1))

    found = await doctor.findings()

    assert set(found) == EVERYTHING
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["schema"].text == "version 0001"
    assert found["postgresql"].text.startswith("version 1")
    assert "password" not in repr(found)


async def test_listeners(doctor: Doctor) -> None:
    await doctor.listener("stopped")
    await doctor.listener("listening", timedelta(seconds=16))
    assert await doctor.says("listeners") == (
        "bad",
        "none is alive: nothing is placed or published; start `chaz listener`",
    )
    await doctor.listener()
    await doctor.listener()
    assert await doctor.says("listeners") == ("ok", "2 listening")
    await doctor.listener("polling")
    assert await doctor.says("listeners") == (
        "warn",
        "2 listening, 1 polling; one that polls has lost its LISTEN connection",
    )


async def test_workers(doctor: Doctor, stations: Stations) -> None:
    stations.beat(timedelta(seconds=-1))
    # A worker of the threads pool takes its lease with its first run.
    assert (await doctor.says("workers"))[0] == "warn"
    await stations.send("s")
    await stations.place()
    assert (await doctor.says("workers"))[0] == "warn"
    await doctor.change("update chaz.runs set queued_at = now() - %(ago)s", ago=LONG_AGO)
    assert await doctor.says("workers") == ("bad", "none is alive, and runs wait; start `celery -A chaz worker`")
    stations.beat(timedelta(minutes=1), uuid4())
    assert await doctor.says("workers") == ("ok", "1 process alive")


async def test_what_is_paused(doctor: Doctor, stations: Stations) -> None:
    async def pause(what: str, reason: str) -> None:
        await stations.transact(lambda tx: pauses.pause(tx, Subject.parse(what), tenant="", by="ada", reason=reason))

    await pause("agent:solo", "too dear")
    await pause("all", "")
    assert await doctor.says("paused") == (
        "warn",
        "agent:solo by ada (too dear), all by ada; `chaz resume` lets it go on",
    )


async def test_what_has_reached_its_limit(doctor: Doctor, stations: Stations) -> None:
    assert await doctor.says("limits") == ("ok", "none is reached")
    limit: dict[str, Any] = {"tenant": "", "period": timedelta(days=1), "tokens": 1, "cost": None, "by": "ada"}
    await stations.transact(lambda tx: limits.set_limit(tx, Subject.parse("agent:solo"), **limit))
    assert await doctor.says("limits") == ("ok", "none is reached")
    await stations.step(await stations.claimed("s"))
    verdict, text = await doctor.says("limits")
    assert verdict == "warn"
    assert text.startswith("reached: agent:solo till ")


async def test_the_inbox(doctor: Doctor, stations: Stations) -> None:
    await stations.send("s")
    verdict, text = await doctor.says("inbox")
    assert (verdict, text.partition(",")[0]) == ("ok", "1 entry not placed")
    for age, judged in ((20, "warn"), (200, "bad")):
        # The log is append-only, so an old entry is a new one with an old date.
        await doctor.change(
            """
            insert into chaz.entries (session_id, type, sender, content, created_at)
            values (gen_random_uuid(), 'message', 'ada', 'hi', now() - %(age)s)
            """,
            age=timedelta(seconds=age),
        )
        assert (await doctor.says("inbox"))[0] == judged
    assert "3 entries not placed, the oldest 3 min old" in (await doctor.says("inbox"))[1]


async def test_queued_runs_and_agents_that_nobody_serves(doctor: Doctor, stations: Stations) -> None:
    await stations.send("s")
    await stations.send("t", recipient="newcomer")
    await stations.place()
    stations.beat(timedelta(hours=1))
    assert await doctor.says("queued") == ("ok", "2 runs, the oldest unclaimed for 0 s")
    assert (await doctor.says("agents"))[0] == "ok"

    await doctor.change("update chaz.runs set queued_at = now() - %(ago)s", ago=LONG_AGO)
    assert await doctor.says("queued") == ("warn", "2 runs, the oldest unclaimed for 60 min")
    assert await doctor.says("agents") == (
        "warn",
        "no living worker is known to serve newcomer (1 queued run, never registered by any worker)",
    )

    await doctor.change("update chaz.agents set seen_at = now() - %(ago)s", ago=LONG_AGO)
    assert await doctor.says("agents") == (
        "warn",
        "no living worker is known to serve newcomer (1 queued run, never registered by any worker), "
        "solo (1 queued run)",
    )

    await stations.claimed("u")
    assert "solo" not in (await doctor.says("agents"))[1], "a living worker runs it"


async def test_a_run_that_is_to_go_on_later_is_not_late(doctor: Doctor, stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.give_back(claim, wait=3600)
    await doctor.change("update chaz.runs set queued_at = now() - %(ago)s", ago=LONG_AGO)
    assert (await doctor.says("queued"))[0] == "ok"
    assert (await doctor.says("agents"))[0] == "ok"


async def test_runs_past_their_lease(doctor: Doctor, stations: Stations) -> None:
    await stations.claimed("s")
    assert await doctor.says("leases") == ("ok", "no run is past its lease")
    stations.beat(timedelta(seconds=-1))
    assert (await doctor.says("leases"))[0] == "warn"
    stations.beat(timedelta(minutes=-10))
    verdict, text = await doctor.says("leases")
    assert (verdict, text.partition(";")[0]) == ("bad", "1 run past the lease, by 10 min")


async def test_parked_runs(doctor: Doctor, stations: Stations) -> None:
    claim, _ = await stations.spawning("s")
    await stations.park(claim)
    assert await doctor.says("parked") == ("ok", "1 run")
    await doctor.change("update chaz.waits set answer = '{}', answered_at = now()")
    assert await doctor.says("parked") == ("bad", "1 run, 1 of them waiting for nothing")


async def test_cancels_that_nobody_acts_on(doctor: Doctor, stations: Stations) -> None:
    root = await stations.claimed("s", recipient="parent")
    await stations.step(root, *[a_call("spawn_agent")] * 2)
    await stations.spawn(root)
    survivor = await stations.spawn(root, ordinal=1, wait=False, detached=True)
    await stations.place()
    unplaced = await stations.send("t")
    for run in (root.run_id, unplaced):
        await stations.transact(partial(cancelling.request, run_id=run, by="ada"))
    assert await doctor.says("cancels") == ("ok", "none is open for long")

    await doctor.change("update chaz.cancellations set requested_at = now() - interval '20 s'")
    verdict, text = await doctor.says("cancels")
    assert verdict == "bad"
    assert re.fullmatch(
        r"2 cancels open, the oldest for 2\d s; 2 runs of theirs still to be ended, and 1 entry not placed; "
        r"no listener is alive to end them: start `chaz listener`",
        text,
    )
    await doctor.listener()
    verdict, text = await doctor.says("cancels")
    assert (verdict, "the listeners' logs say why" in text) == ("warn", True)
    await doctor.change("update chaz.cancellations set requested_at = now() - %(ago)s", ago=LONG_AGO)
    assert (await doctor.says("cancels"))[0] == "bad"

    await stations.place()
    while (await cancelling.walk(stations.database, aside=Aside())).settled:
        pass
    assert await doctor.says("cancels") == ("ok", "none is open for long")
    assert await stations.state(survivor) == "queued"


async def test_the_audit_backlog(doctor: Doctor, stations: Stations) -> None:
    await stations.end(await stations.claimed("s"))
    await doctor.change("update chaz.runs set audit_after = now() + interval '5 s'")
    assert await doctor.says("audit") == ("ok", "no backlog")
    # Looked at again and again, and its events do not come.
    await doctor.change("update chaz.runs set ended_at = now() - %(ago)s", ago=LONG_AGO)
    verdict, text = await doctor.says("audit")
    assert (verdict, "no listener" in text) == ("warn", False)
    await doctor.change("update chaz.runs set audit_after = now() - interval '61 s'")
    assert "no listener has looked at 1 of them" in (await doctor.says("audit"))[1]


@both_brokers
async def test_the_broker_and_its_dead_letters(doctor: Doctor, broker: Broker) -> None:
    verdict, text = await doctor.says("broker")
    assert f"prefix {broker.prefix!r}" in text
    assert "guest:guest" not in text
    if broker.url.startswith("redis"):
        assert (verdict, text.partition(";")[2]) == ("ok", " visibility_timeout 24 h")
    else:
        assert text.startswith("RabbitMQ 3.")
        assert "consumer_timeout" in text or verdict == "ok"
    assert await doctor.says("dead letters") == ("ok", "none")

    dead = dead_letter_queue(broker.prefix)
    with broker.connect() as connection:
        for _ in range(2):
            connection.Producer().publish({}, exchange=dead.exchange, routing_key=dead.routing_key, declare=[dead])

    # RabbitMQ counts a moment later.
    for _ in range(50):
        if (await doctor.says("dead letters"))[1].startswith("2 "):
            break
    assert await doctor.says("dead letters") == (
        "warn",
        f"2 deliveries in {broker.prefix}.audit.dead, each with its reason in x-chaz-reason",
    )


async def test_what_is_away_is_a_finding(doctor: Doctor) -> None:
    found = await doctor.findings(broker_url=NOBODY_LISTENS)
    assert set(found) == EVERYTHING - {"audit queue", "dead letters"}
    assert found["broker"].verdict == "bad"

    found = await doctor.findings(database_url="postgresql://ada:secret@127.0.0.1:1/none")
    assert set(found) == {"postgresql", "broker", "audit queue", "dead letters"}
    assert found["postgresql"].verdict == "bad"
    assert "secret" not in found["postgresql"].text


async def test_a_bell_that_is_not_heard(doctor: Doctor, server: Server) -> None:
    # Another database, as far as a NOTIFY goes; so is one behind a pooler of transactions.
    with server.scratch(empty=True) as other:
        found = (await doctor.findings(listen_url=other.url))["doorbell"]
    assert (found.verdict, "is not heard at" in found.text, "CHAZ_LISTEN_URL" in found.text) == ("warn", True, True)
    found = (await doctor.findings(listen_url="postgresql://ada:secret@127.0.0.1:1/none"))["doorbell"]
    assert (found.verdict, "secret" in found.text) == ("warn", False)
    assert "cannot LISTEN, and poll" in found.text


async def test_suspect_runs_without_a_worker_of_their_own(doctor: Doctor, stations: Stations) -> None:
    claim = await stations.claimed("s")
    assert await doctor.says("isolation") == ("ok", "no suspect run")
    await doctor.change("update chaz.runs set suspect = true where id = %(id)s", id=claim.run_id)
    verdict, text = await doctor.says("isolation")
    assert (verdict, "start `chaz worker --isolation`" in text) == ("warn", True)
    await doctor.change("update chaz.workers set isolation = true")
    assert (await doctor.says("isolation"))[0] == "ok"


def test_a_visibility_timeout_that_is_too_short(broker: Broker) -> None:
    if broker.url.startswith("redis"):
        found = doctors_broker(broker.settings(), {"visibility_timeout": 3600})
        assert (found.verdict, "visibility_timeout 60 min: a run that takes longer" in found.text) == ("warn", True)


async def test_a_database_without_the_schema(doctor: Doctor, server: Server) -> None:
    with server.scratch(empty=True) as empty:
        found = await doctor.findings(database_url=empty.url)
    assert set(found) == {"postgresql", "schema", "broker", "audit queue", "dead letters"}
    assert found["schema"] == Finding("schema", "bad", "none; this chaz needs 0001: run `chaz schema upgrade`")


async def test_a_schema_of_another_version(doctor: Doctor) -> None:
    await doctor.change("update chaz.alembic_version set version_num = '0000'")
    assert (await doctor.says("schema"))[0] == "bad"
    await doctor.change("update chaz.alembic_version set version_num = '9999'")
    assert (await doctor.says("schema"))[0] == "warn"


def test_the_command(processes: Processes, database: ScratchDatabase) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "chaz", "doctor", *arguments],
            env=processes.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = command()
    assert done.returncode == 1, done.stderr
    assert "bad   listeners     none is alive" in done.stdout

    listener = processes.listener()
    processes.worker()
    with Chaz(database.url) as chaz:
        assert chaz.session("talk").direct("solo", "Hello").get(30) == "You said: Hello"
    done = command("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["name"]: finding for finding in map(json.loads, done.stdout.splitlines())}
    assert set(found) == EVERYTHING
    assert {finding["verdict"] for finding in found.values()} == {"ok"}
    assert found["listeners"]["text"] == "1 listening"

    listener.stop()
    assert command().returncode == 1
    assert command("--broker", NOBODY_LISTENS).stdout.count("bad ") == 2
